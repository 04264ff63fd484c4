"""What is measured with vLLM's engine or server beside it."""
