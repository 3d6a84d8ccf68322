"""Matrix products and paged attention of one SmolLM2-135M step, against torch in the same run.

Usage: python benchmarks/kernels.py [--threads N] [--rows 1,8,32,64,256]

The floor of a row count is the larger of reading every weight once at the bandwidth measured here
and doing every multiply-add at the best rate torch.mm reaches here.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import torch

from tokentight.kernels.interface import HeadShape, StepInputs
from tokentight.kernels.native import NativeKernels

LAYERS = 30
HEADS = HeadShape(num_heads=9, num_kv_heads=3, head_dim=64)
LAYER_SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))  # (out, in)
HEAD_SHAPE = (49152, 576)


def best_ms(run: Callable[[], object], seconds: float = 0.8) -> float:
    """The fastest of the repetitions that fit into `seconds` (at least three), milliseconds."""
    run()
    times: list[float] = []
    while len(times) < 3 or sum(times) < seconds:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def read_bandwidth() -> float:
    """Bytes per second of summing 512 MiB."""
    data = torch.ones(1 << 27)
    return data.nbytes / best_ms(data.sum) * 1e3


def peak_flops() -> float:
    """Best rate of a square torch.mm, floating-point operations per second."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return 2 * 1024**3 / best_ms(lambda: torch.mm(a, b)) * 1e3


def matrix_products(threads: int, row_counts: list[int]) -> None:
    bandwidth, flops = read_bandwidth(), peak_flops()
    print(
        f"{threads} threads, reads {bandwidth / 1e9:.1f} GB/s, torch.mm {flops / 1e9:.0f} GFLOP/s"
    )
    kernels = NativeKernels(threads)
    shapes = [*LAYER_SHAPES * LAYERS, HEAD_SHAPE]
    weights = [torch.randn(shape) * 0.02 for shape in shapes]
    packed = [kernels.pack(weight) for weight in weights]
    packed_bf16 = [kernels.pack(weight.bfloat16()) for weight in weights]
    transposed = [weight.t() for weight in weights]
    weight_bytes = sum(weight.nbytes for weight in weights)
    parameters = sum(weight.numel() for weight in weights)
    print("matrix products of the whole model, ms")
    print(f"{'rows':>5} {'native':>9} {'bf16':>9} {'torch':>9} {'floor':>9}"
          f" {'torch/native':>13} {'native/floor':>13} {'GFLOP/s':>8}")  # fmt: skip
    for rows in row_counts:
        inputs = {columns: torch.randn(rows, columns) for _, columns in set(shapes)}
        native = best_ms(lambda: [kernels.linear(inputs[w.num_cols], w) for w in packed])  # noqa: B023
        bf16 = best_ms(lambda: [kernels.linear(inputs[w.num_cols], w) for w in packed_bf16])  # noqa: B023
        peer = best_ms(lambda: [torch.mm(inputs[w.shape[0]], w) for w in transposed])  # noqa: B023
        floor = 1e3 * max(weight_bytes / bandwidth, 2 * parameters * rows / flops)
        print(f"{rows:>5} {native:>9.1f} {bf16:>9.1f} {peer:>9.1f} {floor:>9.1f}"
              f" {peer / native:>13.2f} {native / floor:>13.2f}"
              f" {2 * parameters * rows / native / 1e6:>8.0f}")  # fmt: skip


def attention(threads: int) -> None:
    kernels = NativeKernels(threads)
    print(
        f"paged attention of {LAYERS} layers, ms (torch: scaled_dot_product_attention, not paged)"
    )
    print(
        f"{'requests':>8} {'new':>5} {'context':>8} {'native':>9} {'torch':>9} {'torch/native':>13}"
    )
    for requests, new, context in ((1, 1, 400), (32, 1, 400), (128, 1, 400), (1, 256, 256)):
        native = native_attention_ms(kernels, requests, new, context)
        peer = torch_attention_ms(requests, new, context)
        print(
            f"{requests:>13} {new:>13} {context:>13} {native:>13.2f} {peer:>13.2f}"
            f" {peer / native:>13.2f}"
        )


def native_attention_ms(kernels: NativeKernels, requests: int, new: int, context: int) -> float:
    size = 16
    width = -(-context // size)
    tables = (1 + torch.randperm(requests * width)).view(requests, width)
    layers = [kernels.allocate_kv(HEADS, requests * width + 1, size) for _ in range(LAYERS)]
    positions = torch.arange(context - new, context).repeat(requests).int()
    step = StepInputs(
        token_ids=positions,
        positions=positions,
        slots=torch.zeros(requests * new, dtype=torch.int64),
        query_starts=(torch.arange(requests + 1) * new).int(),
        context_lens=torch.full((requests,), context, dtype=torch.int32),
        block_tables=tables.int(),
        block_size=size,
    )
    q = torch.randn(requests * new, HEADS.num_heads * HEADS.head_dim)
    return best_ms(lambda: [kernels.attention(q, step, kv, HEADS, 0.125, None) for kv in layers])


def torch_attention_ms(requests: int, new: int, context: int) -> float:
    shape = (requests, HEADS.num_kv_heads, context, HEADS.head_dim)
    layers = [(torch.randn(shape), torch.randn(shape)) for _ in range(LAYERS)]
    q = torch.randn(requests, HEADS.num_heads, new, HEADS.head_dim)
    attend = torch.nn.functional.scaled_dot_product_attention
    return best_ms(lambda: [attend(q, k, v, is_causal=new > 1, enable_gqa=True) for k, v in layers])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rows", default="1,8,32,64,256")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    matrix_products(options.threads, [int(rows) for rows in options.rows.split(",")])
    attention(options.threads)


if __name__ == "__main__":
    main()
