"""The demonstration: a real model, asked alone and under load, compared bit by bit."""
