"""The arithmetic: `reference` (plain torch) and `native` (C, compiled on first use)."""
