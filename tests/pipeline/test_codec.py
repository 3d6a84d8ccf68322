"""Plans and results survive the wire bit for bit, and nothing damaged passes for one."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import a_plan, a_result

from tokentight.pipeline import codec
from tokentight.pipeline.stage_process import StaleEpochError, check
from tokentight.pipeline.transport import HiddenHeader


def assert_same(left: object, right: object) -> None:
    assert type(left) is type(right)
    if is_dataclass(left):
        for field in fields(left):
            assert_same(getattr(left, field.name), getattr(right, field.name))
    elif isinstance(left, np.ndarray):
        assert isinstance(right, np.ndarray)
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        assert left.tobytes() == right.tobytes()
    else:
        assert left == right


@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 9))
def test_a_plan_survives_the_wire(seed: int, num_rows: int, max_tokens: int) -> None:
    plan = a_plan(seed, num_rows, max_tokens)
    assert_same(codec.decode_plan(codec.encode(plan)), plan)


@given(st.integers(0, 2**32), st.integers(0, 6), st.integers(0, 5))
def test_a_result_survives_the_wire(seed: int, num_sampled: int, num_scored: int) -> None:
    result = a_result(seed, num_sampled, num_scored)
    assert_same(codec.decode_result(codec.encode(result)), result)


@given(st.data())
def test_one_flipped_bit_anywhere_is_refused(data: st.DataObject) -> None:
    encoded = bytearray(codec.encode(a_plan(0, 3, 5)))
    bit = data.draw(st.integers(0, 8 * len(encoded) - 1))
    encoded[bit // 8] ^= 1 << bit % 8
    with pytest.raises(codec.DigestMismatchError):
        codec.decode_plan(bytes(encoded))


def test_a_result_is_no_plan() -> None:
    with pytest.raises(codec.MalformedMessageError):
        codec.decode_plan(codec.encode(a_result(0, 2, 0)))


def test_equal_plans_have_equal_digests_and_others_do_not() -> None:
    plan = a_plan(0, 3, 5)
    digest = codec.digest_of(codec.encode(plan))
    assert digest == codec.digest_of(codec.encode(a_plan(0, 3, 5)))
    token_ids = plan.token_ids.copy()
    token_ids[0] ^= 1
    assert digest != codec.digest_of(codec.encode(replace(plan, token_ids=token_ids)))
    assert digest != codec.digest_of(codec.encode(replace(plan, epoch=plan.epoch + 1)))


def test_an_array_of_another_type_is_not_sent() -> None:
    plan = a_plan(0, 2, 2)
    with pytest.raises(TypeError, match="token_ids has dtype int64"):
        codec.encode(replace(plan, token_ids=plan.token_ids.astype(np.int64)))


def test_a_stage_refuses_what_does_not_belong_together() -> None:
    plan = a_plan(0, 2, 4)
    digest = codec.digest_of(codec.encode(plan))
    shape = (plan.num_scheduled_tokens, 8)
    check(plan, digest, HiddenHeader(plan.step, plan.epoch, digest, shape), plan.epoch)
    with pytest.raises(StaleEpochError):
        check(plan, digest, None, plan.epoch + 1)
    for header in (
        HiddenHeader(plan.step + 1, plan.epoch, digest, shape),
        HiddenHeader(plan.step, plan.epoch + 1, digest, shape),
        HiddenHeader(plan.step, plan.epoch, bytes(32), shape),
        HiddenHeader(plan.step, plan.epoch, digest, (shape[0] - 1, 8)),
    ):
        with pytest.raises(codec.DigestMismatchError):
            check(plan, digest, header, plan.epoch)
