"""The draft's loop: forwards, sampled candidates, and the policy that ends a block."""
