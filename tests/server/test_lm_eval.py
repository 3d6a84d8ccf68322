"""`lm_eval --model local-completions`, as its users run it, against the real engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from running_service import RunningService

pytest.importorskip("lm_eval", reason="comes with the extra `dev`")
pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.ci]

CHOICES = """
task: choose
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
metric_list: [{{metric: acc}}]
"""
SAYING = """
task: say
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 12, temperature: 0}}
metric_list: [{{metric: exact_match}}]
"""


def greedy(service: RunningService, question: str) -> str:
    """What lm_eval is to be told: text up to its stop string, as it stops the model."""
    body = {"prompt": question, "max_tokens": 12, "temperature": 0, "stop": ["\n", "</s>"]}
    response = service.client.post("/v1/completions", json=body)
    return str(response.json()["choices"][0]["text"])


def scored(service: RunningService, question: str, choice: str) -> float:
    """The logprob of `choice` after `question`, from prompt logprobs instead of an echo."""
    body = {"prompt": f"{question} {choice}", "max_tokens": 0, "prompt_logprobs": 0}
    response = service.client.post("/v1/completions", json={**body, "return_token_ids": True})
    (answer,) = response.json()["choices"]
    ids, entries = answer["prompt_token_ids"], answer["prompt_logprobs"]
    first = len(question.encode())  # one token a byte
    return sum(
        entry[str(token_id)]["logprob"]
        for token_id, entry in zip(ids[first:], entries[first:], strict=True)
    )


def run_lm_eval(service: RunningService, directory: Path) -> dict[str, Any]:
    model_args = (
        f"model=tiny,base_url={service.url}/v1/completions,num_concurrent=8,max_length=255,"
        "max_retries=1"
    )
    subprocess.run(
        [
            *(sys.executable, "-m", "lm_eval", "--model", "local-completions"),
            *("--model_args", model_args, "--tasks", "choose,say"),
            *("--include_path", str(directory), "--batch_size", "4", "--log_samples"),
            *("--output_path", str(directory / "out")),
        ],
        check=True,
        cwd=directory,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(directory / "hf")},
        timeout=240,
    )
    (file,) = directory.glob("out/**/results_*.json")
    results: dict[str, Any] = json.loads(file.read_text())["results"]
    return results


def samples(directory: Path, task: str) -> list[Any]:
    (file,) = directory.glob(f"out/**/samples_{task}_*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_loglikelihood_and_a_generation_task(
    real_service: RunningService, tmp_path: Path
) -> None:
    """Expected answers are what the service says one at a time; lm_eval, 8 at a time in batches of
    4, must find every one of them, and the likeliest choice."""
    questions = [f"question {i}:" for i in range(12)]
    choices = ["yes", "no", "maybe"]
    docs = []
    for question in questions:
        likelihoods = [scored(real_service, question, choice) for choice in choices]
        docs.append(
            {
                "question": question,
                "choices": choices,
                "label": likelihoods.index(max(likelihoods)),
                "answer": greedy(real_service, question),
                "likelihoods": likelihoods,
            }
        )
    data = tmp_path / "docs.jsonl"
    data.write_text("\n".join(json.dumps(doc) for doc in docs), encoding="utf-8")
    (tmp_path / "choose.yaml").write_text(CHOICES.format(data=data), encoding="utf-8")
    (tmp_path / "say.yaml").write_text(SAYING.format(data=data), encoding="utf-8")
    results = run_lm_eval(real_service, tmp_path)
    assert results["choose"]["acc,none"] == 1.0
    assert results["say"]["exact_match,none"] == 1.0
    for sample in samples(tmp_path, "choose"):
        found = [float(response[0][0]) for response in sample["resps"]]
        assert found == pytest.approx(sample["doc"]["likelihoods"], rel=1e-12)
