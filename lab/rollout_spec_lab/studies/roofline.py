"""Step times of the roofline beside published and measured ones.

    python lab/rollout_spec_lab/studies/roofline.py [--cpu]

Prints, for every pair of a model and a device, milliseconds of decoding steps: published, and predicted. With
--cpu: this machine's reading and computing are measured, and what `bench engine` has recorded here is
predicted from them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rollout_spec.predict.roofline import (
    COMPUTE_EFFICIENCY,
    DEVICES,
    MEMORY_EFFICIENCY,
    Device,
    Model,
    Roofline,
)

RECORD = Path(__file__).parent / "record"
MODELS = {path.stem: Model.read(path) for path in Path(__file__).parents[3].glob("recipes/models/*.json")} | {
    "qwen3_1_7b": Model(2048, 28, 16, 8, 128, 6144, 151936, ties_embeddings=True),
    "qwen3_4b": Model(2560, 36, 32, 8, 128, 9728, 151936, ties_embeddings=True),
    "qwen3_14b": Model(5120, 40, 40, 8, 128, 17408, 151936),
    "qwen3_30b_a3b": Model(2048, 48, 32, 4, 128, 768, 151936, 128, 8),
    "qwen2_5_7b": Model(3584, 28, 28, 4, 128, 18944, 152064),
    "qwen2_5_14b": Model(5120, 48, 40, 8, 128, 13824, 152064),
    "qwen2_5_32b": Model(5120, 64, 40, 8, 128, 27648, 152064),
    "qwen2_5_72b": Model(8192, 80, 64, 8, 128, 29568, 152064),
    "mixtral_8x22b": Model(6144, 56, 48, 8, 128, 16384, 32768, 8, 2),
    "dbrx": Model(6144, 40, 48, 8, 128, 10752, 100352, 16, 4),
}


class Step(NamedTuple):
    rows: int
    context: float
    """Of a row, on average over its decoding."""
    milliseconds: float
    num_prompt: int = 0
    """Of which the prefill is a 2,048th part of the milliseconds."""


class Pair(NamedTuple):
    model: str
    gpu: str
    tp: int
    expert_parallel: bool
    source: str
    steps: list[Step]


def serving(num_in: int, num_out: int, *points: tuple[int, float]) -> list[Step]:
    """Of requests with so many tokens in and out: (concurrency, milliseconds a token)."""
    return [Step(rows, num_in + num_out / 2, ms) for rows, ms in points]


def reasoning(*points: tuple[int, float, float]) -> list[Step]:
    """Of GPQA's prompts, taken as 250 tokens: (rows, mean length of the responses, milliseconds)."""
    return [Step(rows, 250 + num_out / 2, ms) for rows, num_out, ms in points]


def offline(*points: tuple[int, float]) -> list[Step]:
    """vLLM's benchmark_latency as it comes, 32 tokens in and 128 out: (batch, seconds for all)."""
    return [Step(rows, 32 + 64, seconds / 128 * 1e3) for rows, seconds in points]


def single(*points: tuple[int, float]) -> list[Step]:
    """One request with 2,048 tokens out: (tokens in, tokens per second)."""
    return [Step(1, num_in + 1024, 1e3 / per_second, num_in) for num_in, per_second in points]


SILY = "silybench-data, perf_points.csv, vLLM 0.30"
ENERGY = "ML.ENERGY leaderboard 3.0, gpqa.json, vLLM 0.11.1"
ARENA = "ML.ENERGY leaderboard 3.0, lm-arena-chat.json, vLLM 0.11.1"
TT = "tenstorrent/tt-inference-server issue 340, July 2025"
QWEN = "Qwen2.5 speed benchmark, vLLM 0.6.3"
CALIBRATION = [
    Pair("qwen3_8b", "h100", 1, False, SILY,
         serving(128, 128, (1, 6.83), (16, 7.14), (64, 8.15), (128, 9.34), (256, 12.83))
         + serving(128, 1024, (1, 6.86), (16, 7.53), (64, 9.49), (128, 12.00), (256, 18.08))
         + serving(2048, 2048, (1, 7.00), (16, 9.46), (64, 17.05))
         + serving(8192, 512, (1, 7.30), (4, 8.62), (16, 13.75), (32, 20.27))),
    Pair("qwen3_1_7b", "a100", 1, False, TT, serving(128, 128, (1, 4.6)) + serving(2048, 128, (1, 5.0))),
    Pair("qwen3_32b", "910b", 4, False, "vllm-ascend issue 4656", serving(15000, 1000, (1, 38.0))),
]  # fmt: skip
CHECK = [
    Pair("qwen3_8b", "h100", 1, False, ENERGY,
         reasoning((8, 7854, 9.70), (16, 7861, 11.91), (32, 8170, 16.87), (63, 8367, 26.64),
                   (82, 8052, 27.88))),
    Pair("qwen3_14b", "h100", 1, False, ENERGY,
         reasoning((8, 6930, 14.42), (16, 7432, 17.34), (32, 6939, 21.55), (59, 6711, 28.07))),
    Pair("qwen3_32b", "h100", 2, False, ENERGY,
         reasoning((8, 6936, 16.72), (16, 6906, 19.32), (32, 7176, 25.27), (64, 7058, 32.28))),
    Pair("qwen3_30b_a3b", "h100", 1, False, ENERGY, reasoning((8, 8162, 12.31), (16, 8243, 16.75))),
    Pair("qwen3_30b_a3b", "h100", 2, True, ENERGY,
         reasoning((8, 8309, 9.37), (16, 7950, 11.97), (32, 8110, 16.40), (64, 8117, 21.54),
                   (96, 8283, 27.71), (128, 8058, 28.59))),
    Pair("qwen3_30b_a3b", "h100", 1, False, "vLLM pull request 23151", serving(2048, 1024, (10, 13.18))),
    Pair("qwen3_235b", "h100", 8, True, ENERGY,
         reasoning((8, 9195, 20.24), (16, 9199, 24.88), (32, 8955, 33.39))),
    Pair("qwen3_14b", "h100", 1, False, ARENA,
         serving(100, 620, (8, 12.54), (16, 13.34), (32, 15.01), (64, 18.94), (128, 26.16), (253, 38.40))),
    Pair("dbrx", "h100", 4, False, "vLLM pull request 3692, 2024",
         offline((8, 3.2546), (16, 3.6656), (32, 3.9788), (64, 4.4461))),
    Pair("dbrx", "h100", 8, False, "vLLM pull request 3692, 2024",
         offline((8, 2.3051), (16, 2.5643), (32, 2.7667), (64, 3.3473))),
    Pair("qwen3_30b_a3b", "a100", 1, False, TT, serving(128, 128, (1, 9.6)) + serving(8192, 128, (1, 10.6))),
    Pair("qwen2_5_7b", "a100", 1, False, QWEN,
         single((1, 84.28), (6144, 80.70), (14336, 77.69), (30720, 70.33))),
    Pair("qwen2_5_14b", "a100", 1, False, QWEN,
         single((1, 46.30), (6144, 43.83), (14336, 41.91), (30720, 37.18))),
    Pair("qwen2_5_32b", "a100", 2, False, QWEN, single((30720, 31.82))),
    Pair("qwen2_5_72b", "a100", 4, False, QWEN,
         single((1, 31.37), (6144, 29.90), (14336, 30.10), (30720, 27.53))),
    Pair("mixtral_8x22b", "a100", 4, False, "vLLM pull request 4002, 2024",
         offline((8, 5.4268), (16, 6.1079), (32, 6.8939))),
    Pair("mixtral_8x22b", "a100", 8, False, "vLLM pull request 4002, 2024",
         offline((8, 3.7084), (16, 4.0473), (32, 4.3907))),
    Pair("qwen3_30b_a3b", "910b", 4, False, "vllm-ascend issue 4656", serving(15000, 1000, (1, 20.0))),
    Pair("qwen3_4b", "910b", 4, False, "vllm-ascend issue 4656", serving(15000, 1000, (1, 20.0))),
]  # fmt: skip


def errors(pair: Pair) -> Iterator[tuple[Step, float, float]]:
    """Each step, its predicted milliseconds, and the error as a share of what was published."""
    roofline = Roofline(
        MODELS[pair.model],
        DEVICES[pair.gpu],
        pair.tp,
        expert_parallel=pair.expert_parallel,
        memory_share=0.99,
    )
    for step in pair.steps:
        seconds = roofline.seconds(step.rows, False, int(step.rows * step.context))
        if step.num_prompt:
            seconds += roofline.seconds(step.num_prompt, False) / 2048
        predicted = 1e3 * seconds
        yield step, predicted, predicted / step.milliseconds - 1.0


def print_pairs(title: str, pairs: list[Pair]) -> None:
    print(f"\n## {title}\n")
    print("| model | devices | rows x context: published > predicted, ms | mean error | source |")
    print("|---|---|---|---|---|")
    found = []
    for pair in pairs:
        layout = f"{pair.tp} {pair.gpu}" + (", expert parallel" if pair.expert_parallel else "")
        results = list(errors(pair))
        steps = ", ".join(
            f"{step.rows} x {step.context:.0f}: {step.milliseconds:.1f} > {predicted:.1f}"
            for step, predicted, _ in results
        )
        of_pair = [error for _, _, error in results]
        found += of_pair
        mean = f"{np.mean(np.abs(of_pair)):.0%}"
        print(f"| {pair.model} | {layout} | {steps} | {mean} | {pair.source} |")
    absolute = np.abs(found)
    print(f"\n{len(found)} step times: mean error {absolute.mean():.1%}, median {np.median(absolute):.1%}, "
          f"from {min(found):+.0%} to {max(found):+.0%}")  # fmt: skip


SMOLLM2 = Model(576, 30, 9, 3, 64, 1536, 49152, ties_embeddings=True, bytes_per_value=4)


def best_seconds(function: Callable[[], object], num_runs: int) -> float:
    times = []
    for _ in range(num_runs):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return min(times)


def cpu_device(first_seconds: float) -> Device:
    """This CPU: what it attains at best, and a floor that makes a step of one token take first_seconds."""
    import torch

    memory = torch.rand(64 << 20)  # beyond the caches
    bytes_per_s = memory.numel() * 4 / best_seconds(memory.sum, 100)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two would wait for each other where the machine is shared
    tokens = torch.rand(64, 576)
    weights = [torch.rand(1536, 576) for _ in range(40)]
    seconds = best_seconds(lambda: [tokens @ weight.T for weight in weights], 100)
    flops_per_s = num_threads * 2 * 64 * 40 * 1536 * 576 / seconds
    print(f"read: {bytes_per_s / 1e9:.1f} GB/s, products: {flops_per_s / 1e9:.0f} GFLOP/s", end=", ")
    # What is measured is attained; a datasheet would say more.
    attained = Device(
        flops_per_s / COMPUTE_EFFICIENCY, bytes_per_s / MEMORY_EFFICIENCY, 64e9, 0.0, 1.0, 0.0, 1.0, 0.0
    )
    floor = first_seconds - Roofline(SMOLLM2, attained).seconds(1, False)
    launch_s = max(0.0, floor / SMOLLM2.num_layers)
    print(f"floor: {1e3 * launch_s:.2f} ms a layer")
    return dataclasses.replace(attained, launch_s=launch_s)


def print_cpu() -> None:
    """SmolLM2-135M, float32, beside engine.json; contexts of about 200 tokens."""
    rows = json.loads((RECORD / "engine.json").read_text())["step_times"]
    roofline = Roofline(SMOLLM2, cpu_device(rows[0]["seconds"]))
    print("| tokens | drafts | measured, ms | predicted, ms | error |")
    print("|---|---|---|---|---|")
    found = []
    for row in rows:
        if row["num_steps"] < 50:
            continue
        predicted = roofline.seconds(row["num_tokens"], row["drafted"], int(200 * row["num_running"]))
        found.append(predicted / row["seconds"] - 1.0)
        if row["num_tokens"] in (1, 2, 4, 8, 12, 16, 24, 32, 40, 48):
            cells = (row["num_tokens"], "yes" if row["drafted"] else "no", f"{1e3 * row['seconds']:.1f}",
                     f"{1e3 * predicted:.1f}", f"{found[-1]:+.0%}")  # fmt: skip
            print("| " + " | ".join(map(str, cells)) + " |")
    mean, largest = np.mean(np.abs(found)), max(found, key=abs)
    print(f"{len(found)} numbers of tokens: mean {mean:.0%}, largest {largest:+.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="check against this machine's own record")
    if parser.parse_args().cpu:
        print_cpu()
        return
    print_pairs("Calibration", CALIBRATION)
    print_pairs("Check", CHECK)


if __name__ == "__main__":
    main()
