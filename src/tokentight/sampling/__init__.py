"""From logits to tokens and logprobs."""
