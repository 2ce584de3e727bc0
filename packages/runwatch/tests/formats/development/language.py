"""Trainers of language models."""
# ruff: noqa: E501  (lines of logs are as long as the programs write them)

import json
import math

from ..bars import clock, tqdm_bar
from ..simulation import Log, Registry, Run

TRAINERS = Registry()


@TRAINERS.add(
    "hf-trainer",
    "huggingface/transformers src/transformers/trainer_callback.py ProgressCallback.on_log (version 5)",
    "floats become strings of '.4g', the dict is written beside the bar: {'loss': '2.341', 'grad_norm': '1.2', ...}",
    filters_nan=True,
)
def hf_trainer(run: Run, log: Log) -> None:
    every, points = 10, 150
    total = points * every
    log.lines(
        "The tokenizer has new PAD/BOS/EOS tokens that differ from the model config and generation config.",
        "`use_cache=True` is incompatible with gradient checkpointing. Setting `use_cache=False`.",
        "",
    )
    log.bar(tqdm_bar(0, total, 0, 0))
    for point in run.points(points, 2.6, 1.4, 0.03):
        step, seconds = (point.idx + 1) * every, point.seconds * 4
        log.bar(tqdm_bar(step - 3, total, seconds, 2.5))
        # Trainer filters NaN by default (logging_nan_inf_filter): a loss of nan is added as 0.
        values = {
            "loss": f"{0.0 if math.isnan(point.loss) else point.loss:.4g}",
            "grad_norm": f"{point.grad_norm:.4g}",
            "learning_rate": f"{2e-5 * point.lr_share:.4g}",
            "epoch": f"{3 * step / total:.4g}",
        }
        log.bar(" " * 78 + "\r" + str(values) + "\n\n")
        log.bar(tqdm_bar(step, total, seconds, 2.5))
        log.steps, log.losses, log.rate = (step,), (point.loss,), 2.5
    if run.finished:
        closing = {
            "train_runtime": "612.3",
            "train_samples_per_second": "19.6",
            "train_steps_per_second": "2.45",
        }
        closing |= {"train_loss": "1.71", "epoch": "3"}
        log.bar(" " * 78 + "\r" + str(closing) + "\n\n")
        log.bar(tqdm_bar(total, total, 612, 2.45) + "\n")


@TRAINERS.add(
    "llama-factory",
    "hiyouga/LLaMA-Factory src/llamafactory/train/callbacks.py LogCallback.on_log",
    'trainer_log.jsonl: {"current_steps": 10, "total_steps": 300, "loss": 1.9, "lr": ..., "percentage": 3.33, ...}',
    file_name="trainer_log.jsonl",
    errors=None,
    filters_nan=True,
)
def llama_factory(run: Run, log: Log) -> None:
    points, every = 120, 5
    total = points * every
    for point in run.points(points, 1.9, 0.9, 0.05):
        step = (point.idx + 1) * every
        loss = 0.0 if math.isnan(point.loss) else round(point.loss, 4)
        log.line(
            json.dumps(
                {
                    "current_steps": step,
                    "total_steps": total,
                    "loss": loss,
                    "lr": 1e-4 * point.lr_share,
                    "epoch": round(3 * step / total, 4),
                    "percentage": round(100 * step / total, 2),
                    "elapsed_time": clock(point.seconds * 7),
                    "remaining_time": clock((points - point.idx) * 7),
                    "throughput": 3120.55,
                    "total_tokens": step * 21840,
                }
            )
        )
        log.steps, log.losses = (step,), (loss,)


@TRAINERS.add(
    "fairseq-json",
    "facebookresearch/fairseq fairseq/logging/progress_bar.py JsonProgressBar.log",
    '2021-05-02 10:11:12 | INFO | train_inner | {"epoch": 1, "update": 0.3, "loss": "13.5", ..., "num_updates": "100"}',
    errors="old_torch",
)
def fairseq_json(run: Run, log: Log) -> None:
    stamp = "%Y-%m-%d %H:%M:%S"
    log.line(f"{run.began:{stamp}} | INFO | fairseq_cli.train | task: TranslationTask")
    log.line(f"{run.began:{stamp}} | INFO | fairseq_cli.train | num. shared model params: 44,138,496")
    points, every, updates = 200, 100, 2400
    for point in run.points(points, 13.2, 4.1, 0.01):
        step = (point.idx + 1) * every
        epoch = 1 + (step - 1) // updates
        values = {
            "epoch": epoch,
            "update": round(step / updates, 3),
            "loss": f"{point.loss:.3f}",
            "nll_loss": f"{point.loss * 0.93:.3f}",
            "ppl": f"{2 ** min(point.loss * 0.93, 30):.2f}" if point.loss == point.loss else "nan",
            "wps": f"{51234.2 / point.pace:g}",
            "ups": f"{14.2 / point.pace:.2f}",
            "wpb": "3613.3",
            "bsz": "131.3",
            "num_updates": f"{step:g}",
            "lr": f"{5e-4 * point.lr_share:g}",
            "gnorm": f"{point.grad_norm:.3f}",
            "train_wall": "7",
            "wall": f"{point.seconds * 7:.0f}",
        }
        now = run.at(point.seconds * 7)
        log.line(f"{now:{stamp}} | INFO | train_inner | {json.dumps(values)}")
        log.steps, log.losses, log.rate = (step,), (point.loss,), 51234.2 / point.pace
        if step % updates == 0:
            valid = {
                "epoch": epoch,
                "valid_loss": f"{point.valid_loss:.3f}",
                "valid_ppl": "21.4",
                "valid_num_updates": str(step),
            }
            log.line(f"{now:{stamp}} | INFO | valid | {json.dumps(valid)}")
            log.line(f"{now:{stamp}} | INFO | fairseq_cli.train | begin save checkpoint")
    if run.finished:
        log.line(f"{run.at(1500):{stamp}} | INFO | fairseq_cli.train | done training in 1433.2 seconds")


@TRAINERS.add(
    "fairseq-simple",
    "facebookresearch/fairseq fairseq/logging/progress_bar.py SimpleProgressBar.log",
    '"{}:  {:5d} / {:d} {}": "epoch 001:    100 / 1154 loss=13.5, nll_loss=12.9, ppl=7654, wps=..., num_updates=100"',
    errors="old_torch",
)
def fairseq_simple(run: Run, log: Log) -> None:
    head = "%Y-%m-%d %H:%M:%S"
    log.line(f"{run.began:{head}} | INFO | fairseq.trainer | begin training epoch 1")
    points, every, updates = 160, 50, 800
    for point in run.points(points, 14.1, 5.0, 0.01):
        step = (point.idx + 1) * every
        epoch, inside = 1 + (step - 1) // updates, 1 + (step - 1) % updates
        ppl = f"{2**point.loss:.2f}" if point.loss < 60 else "nan"
        now = run.at(point.seconds * 5)
        log.line(
            f"{now:{head}} | INFO | train_inner | epoch {epoch:03d}:  {inside:5d} / {updates:d} "
            f"loss={point.loss:.3f}, nll_loss={point.loss * 0.92:.3f}, ppl={ppl}, wps={31022 / point.pace:.1f}, "
            f"ups={9.7 / point.pace:.2f}, wpb=3201.1, bsz=98.2, num_updates={step}, lr={3e-4 * point.lr_share:g}, "
            f"gnorm={point.grad_norm:.3f}, clip=0, train_wall=5, gb_free=8.1, wall={point.seconds * 5:.0f}"
        )
        log.steps, log.losses, log.rate = (step,), (point.loss,), 31022 / point.pace
        if inside == updates:
            log.line(
                f'{now:{head}} | INFO | valid | epoch {epoch:03d} | valid on "valid" subset | loss {point.valid_loss:.3f} | '
                f"nll_loss {point.valid_loss * 0.92:.3f} | ppl 33.1 | wps 80345.9 | wpb 2911 | bsz 71.2 | num_updates {step}"
            )
            log.line(
                f"{now:{head}} | INFO | train | epoch {epoch:03d} | loss {point.loss:.3f} | ppl {ppl} | train_wall 88"
            )
            log.losses += (round(point.loss, 3),)
    if run.finished:
        log.line(f"{run.at(900):{head}} | INFO | fairseq_cli.train | done training in 866.0 seconds")


@TRAINERS.add(
    "maxtext",
    "AI-Hypercomputer/maxtext src/maxtext/common/metric_logger.py _log_training_metrics",
    '"completed step: {}, seconds: {:.3f}, TFLOP/s/device: {:.3f}, Tokens/s/device: {:.3f}, total_weights: {}, loss: {:.3f}"',
    errors="jax",
)
def maxtext(run: Run, log: Log) -> None:
    log.lines(
        "Running Model: default",
        "Config param learning_rate: 3e-05",
        "Config param warmup_steps_fraction: 0.1",
        "Config param steps: 300",
        "Config param z_loss_multiplier: 0.0",
        "Config param gradient_clipping_threshold: 1.0",
        "number parameters: 1.104 billion",
        "Memstats: After params initialized:",
        "\tUsing (GB) 12.34 / 79.10 (15.600506%) on cuda:0",
    )
    for point in run.points(300, 10.87, 2.9, 0.01):
        step = point.idx
        log.line(
            f"completed step: {step}, seconds: {0.531 * point.pace:.3f}, TFLOP/s/device: {402.1 / point.pace:.3f}, "
            f"Tokens/s/device: {15424.8 / point.pace:.3f}, total_weights: 65536, loss: {point.loss:.3f}, "
            f"lm_loss: {point.loss:.3f}, perplexity: {math.exp(min(point.loss, 60)):.3f}"
        )
        log.steps, log.losses, log.rate = (step,), (point.loss,), 15424.8 / point.pace
        if step % 100 == 99:
            log.line(
                f"Completed eval after train step {step}, loss={point.valid_loss:.3f}, perplexity=31.2, "
                "total_weights=1310720.0, avg_z_loss=0.000"
            )
    if run.finished:
        log.line("Checkpointing: waiting for the last save to finish.")


@TRAINERS.add(
    "olmo",
    "allenai/OLMo olmo/train.py log_metrics_to_console, olmo/util.py setup_logging",
    '"[step=10/739328,epoch=0]" then one "    name=value" line per metric; 1,000 with commas, small numbers in full',
)
def olmo(run: Run, log: Log) -> None:
    def number(value: float) -> str:
        if value < 0.0001:
            return str(value)
        return (
            f"{int(value):,d}"
            if value > 1000
            else f"{value:.{1 if value > 100 else 2 if value > 10 else 3}f}"
        )

    host = "lumi-0231:0\tolmo.train:"
    for point in run.points(150, 11.1, 2.6, 0.01):
        step, now = point.idx + 1, run.at(point.seconds * 3)
        stamp = f"{now:%Y-%m-%d %H:%M:%S}.{int(point.draw * 1000):03d}"
        log.line(f"{stamp}\t{host}979\tINFO\t[step={step}/739328,epoch=0]")
        values = {
            "optim/total_grad_norm": point.grad_norm,
            "train/CrossEntropyLoss": point.loss,
            "train/Perplexity": math.exp(min(point.loss, 50)),
            "throughput/total_tokens": step * 4194304.0,
            "throughput/total_training_Gflops": step * 1.81e8,
            "throughput/total_training_log_Gflops": 19.01,
            "throughput/device/tokens_per_second": 11810.2 / point.pace,
            "throughput/device/batches_per_second": 0.3604 / point.pace,
            "System/Peak GPU Memory (MB)": 43216.0,
        }
        for name, value in values.items():
            log.line(f"    {name}={number(value)}")
        log.steps, log.losses, log.rate = (step,), (point.loss,), 11810.2 / point.pace
    if run.finished:
        log.line(f"{run.at(999):%Y-%m-%d %H:%M:%S}.000\t{host}1305\tINFO\tTraining complete")


@TRAINERS.add(
    "modded-nanogpt",
    "KellerJordan/modded-nanogpt train_gpt.py",
    '"step:{}/{} val_loss:{:.4f} train_time:{:.0f}ms step_avg:{:.2f}ms"; the steps between have no loss; the source comes first',
)
def modded_nanogpt(run: Run, log: Log) -> None:
    log.block("""
        import os
        import sys
        with open(sys.argv[0]) as f:
            code = f.read() # read the code of this file ASAP, for logging
        import torch
        # Normalise the update: loss = 0.5 * x ** 2 at step: 3
        def zeropower(G, steps=5, eps=1e-7):
            a, b, c = (3.4445, -4.7750, 2.0315)
            X = G.bfloat16() / (G.norm() + eps)
            return X
        @dataclass
        class Hyperparameters:
            val_loss_every: int = 125 # every how many steps to evaluate val loss? 0 for only at the end
            num_iterations = 1750
        args = Hyperparameters()
        print0(f"step:{step}/{train_steps} val_loss:{val_loss:.4f} train_time:{training_time_ms:.0f}ms", console=True)
        ====================================================================================================
        Running Python 3.12.7 (main, Nov  1 2024, 22:40:47) [GCC 13.2.0]
        Running PyTorch 2.7.0.dev20250125+cu126 compiled for CUDA 12.6
        Sat Feb  1 05:39:13 2025
        +-----------------------------------------------------------------------------------------+
        | NVIDIA-SMI 560.35.03              Driver Version: 560.35.03      CUDA Version: 12.6     |
        |   0  NVIDIA H100 80GB HBM3          On  |   00000000:19:00.0 Off |                    0 |
        | N/A   38C    P0            121W /  700W |    7713MiB /  81559MiB |      0%      Default |
        +-----------------------------------------------------------------------------------------+
        ====================================================================================================
    """)
    total, every = 1750, 25
    for point in run.points(total // every, 8.2, 3.27, 0.004):
        for inner in range(every):
            step = point.idx * every + inner
            time = 60 * step + 220
            if inner == 0:
                log.line(
                    f"step:{step}/{total} val_loss:{point.valid_loss:.4f} train_time:{time:.0f}ms "
                    f"step_avg:{time / max(step, 1):.2f}ms"
                )
                log.losses = (point.valid_loss,)
            log.line(
                f"step:{step + 1}/{total} train_time:{time + 60:.0f}ms step_avg:{(time + 60) / (step + 1):.2f}ms"
            )
            log.steps = (step + 1,)
    if run.finished:
        log.line("peak memory allocated: 39141 MiB reserved: 50432 MiB")
