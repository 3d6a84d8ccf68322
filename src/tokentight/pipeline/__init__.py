"""The step plan, the stages, and the ways plans and hidden states travel between them."""
