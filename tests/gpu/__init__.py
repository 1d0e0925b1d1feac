"""A fake CUDA device, to test the GPU code paths on a machine without a GPU.

Tensors say ``cuda:0`` and hold real numbers on the CPU. What eager CUDA, a stream capture and FlashAttention
refuse is refused here; kernels, copies and waits are counted. What this cannot show is named in one place, at
the top of ``tests/gpu/first_day.py``.

    from tests.gpu import device
    device.prepare()             # before the project's functions run
    device.install()             # from here on there is a CUDA device, until this process ends
    model.to("cuda:0")           # its tensors are now device.CudaTensor
    device.DEVICE.reset()
    ...                          # a round of the engine
    print(device.DEVICE.counts())

A process cannot uninstall the device: tests use it in a process of their own (``tests/forked.py``).
"""
