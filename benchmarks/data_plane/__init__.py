"""What messages, tokens and weights cost on their way, by themselves and against a raw socket."""
