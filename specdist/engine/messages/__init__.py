"""What the engine asks of the draft and the target, and how requests and replies travel between ranks."""
