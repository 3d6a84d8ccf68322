"""Requests, scheduling, KV blocks, the auditor and the step loop."""
