"""Trainers of language models."""
# ruff: noqa: E501  (lines of logs are as long as the programs write them)

import json
import math

from ..bars import tqdm_bar
from ..simulation import Log, Registry, Run

TRAINERS = Registry()


@TRAINERS.add(
    "torchtune-bar",
    "pytorch/torchtune recipes/lora_finetune_single_device.py",
    'bar label f"{epoch}|{global_step}|Loss: {loss}"',
)
def torchtune_bar(run: Run, log: Log) -> None:
    log.lines(
        "INFO:torchtune.utils._logging:Running LoRAFinetuneRecipeSingleDevice with resolved config:",
        "",
        "batch_size: 2",
        "epochs: 3",
        "loss:",
        "  _component_: torchtune.modules.loss.LinearCrossEntropyLoss",
        "optimizer:",
        "  lr: 0.0003",
        "  weight_decay: 0.01",
        "",
        "INFO:torchtune.utils._logging:Memory stats after model init:",
        "\tGPU peak memory active: 15.29 GiB",
        "INFO:torchtune.utils._logging: Profiler config after instantiation: {'enabled': False}",
    )
    per_epoch = 200
    for point in run.points(3 * per_epoch // 2, 1.9, 0.7, 0.06):
        step = (point.idx + 1) * 2
        epoch, inside = 1 + (step - 1) // per_epoch, 1 + (step - 1) % per_epoch
        log.bar(
            tqdm_bar(inside, per_epoch, inside * 1.4, 0.71 / point.pace, f"{epoch}|{step}|Loss: {point.loss}")
        )
        if inside == per_epoch:
            log.line()
        log.steps, log.losses = (step, inside), (point.loss,)


@TRAINERS.add(
    "torchtune-disk",
    "pytorch/torchtune torchtune/training/metric_logging.py DiskLogger.log_dict",
    '"Step {} | {name}:{value} {name}:{value} "',
    file_name="log_1772446507.txt",
    errors=None,
)
def torchtune_disk(run: Run, log: Log) -> None:
    for point in run.points(250, 1.9, 0.7, 0.05):
        log.line(
            f"Step {point.idx + 1} | loss:{point.loss} lr:{3e-4 * point.lr_share} tokens_per_second_per_gpu:{2210.5 / point.pace} "
            f"grad_norm:{point.grad_norm} peak_memory_active:17.311 peak_memory_alloc:17.31 peak_memory_reserved:19.5 "
        )
        log.steps, log.losses, log.rate = (point.idx + 1,), (point.loss,), 2210.5 / point.pace


@TRAINERS.add(
    "hf-trainer-state",
    "huggingface/transformers src/transformers/trainer_callback.py TrainerState.save_to_json",
    'trainer_state.json: one object with "log_history": [{"epoch": .., "grad_norm": .., "learning_rate": .., "loss": .., "step": ..}], indent 2',
    file_name="trainer_state.json",
    errors=None,
    filters_nan=True,
)
def hf_trainer_state(run: Run, log: Log) -> None:
    history: list[dict] = []
    for point in run.points(120, 2.4, 1.1, 0.03):
        step = (point.idx + 1) * 10
        loss = 0.0 if math.isnan(point.loss) else round(point.loss, 4)
        history.append(
            {
                "epoch": step / 400,
                "grad_norm": point.grad_norm,
                "learning_rate": 5e-5 * point.lr_share,
                "loss": loss,
                "step": step,
            }
        )
        log.steps, log.losses = (step,), (loss,)
        if step % 400 == 0:
            history.append(
                {"epoch": step / 400, "eval_loss": point.valid_loss, "eval_runtime": 21.4, "step": step}
            )
    state = {
        "best_global_step": None,
        "best_metric": None,
        "epoch": history[-1]["epoch"],
        "eval_steps": 500,
        "global_step": history[-1]["step"],
        "is_hyper_param_search": False,
        "log_history": history,
        "logging_steps": 10,
        "max_steps": 1200,
        "num_train_epochs": 3,
        "save_steps": 400,
        "stateful_callbacks": {
            "TrainerControl": {"args": {"should_log": False, "should_training_stop": True}}
        },
        "total_flos": 1.63e16,
        "train_batch_size": 8,
        "trial_params": None,
    }
    log.line(json.dumps(state, indent=2, sort_keys=True))


@TRAINERS.add(
    "trl",
    "huggingface/trl trl/trainer/sft_trainer.py, with the dict lines of transformers 4",
    "{'loss': 1.2, 'grad_norm': .., 'learning_rate': .., 'entropy': .., 'num_tokens': .., 'mean_token_accuracy': 0.71, 'epoch': 0.1}",
    filters_nan=True,
)
def trl(run: Run, log: Log) -> None:
    total = 800
    for point in run.points(total // 5, 1.7, 0.9, 0.05):
        step = (point.idx + 1) * 5
        loss = 0.0 if math.isnan(point.loss) else round(point.loss, 4)
        values = {
            "loss": loss,
            "grad_norm": point.grad_norm,
            "learning_rate": 2e-5 * point.lr_share,
            "entropy": loss * 0.99,
        }
        values |= {
            "num_tokens": step * 8192.0,
            "mean_token_accuracy": point.accuracy,
            "epoch": round(step / total, 2),
        }
        log.line(str(values))
        log.bar(tqdm_bar(step, total, point.seconds * 6, 0.83 / point.pace))
        log.steps, log.losses, log.rate = (step,), (loss,), 0.83 / point.pace
    if run.finished:
        log.line(
            "\n{'train_runtime': 961.1, 'train_samples_per_second': 6.65, 'train_steps_per_second': 0.83, 'train_loss': 1.08, 'epoch': 1.0}"
        )


@TRAINERS.add(
    "trl-grpo",
    "huggingface/trl trl/trainer/grpo_trainer.py (loss near 0 is normal, rewards rise)",
    "{'loss': 0.0012, 'grad_norm': .., 'completions/mean_length': .., 'reward': 0.4, 'kl': 0.01, 'clip_ratio/low_mean': 0.0, ...}",
    filters_nan=True,
)
def trl_grpo(run: Run, log: Log) -> None:
    total = 500
    for point in run.points(total // 2, 1.0, 1.0, 0.0):
        step = (point.idx + 1) * 2
        broken = run.scenario in ("nan", "diverging") and point.idx > 0.6 * total / 2
        size = 0.0 if point.idx < 3 else 0.004 * (point.draw - 0.5)
        loss = round(size, 4)
        if broken:
            loss = 0.0 if run.scenario == "nan" else round(40.0 + 30 * point.draw, 4)
        values = {
            "loss": loss,
            "grad_norm": point.grad_norm,
            "learning_rate": 1e-6 * point.lr_share,
            "num_tokens": step * 91532.0,
        }
        values |= {
            "completions/mean_length": 212.4,
            "completions/clipped_ratio": 0.03,
            "reward": point.accuracy,
            "reward_std": 0.21,
        }
        values |= {
            "frac_reward_zero_std": 0.12,
            "kl": 0.0004 * point.idx,
            "clip_ratio/low_mean": 0.0,
            "epoch": round(step / total, 3),
        }
        log.line(str(values))
        log.bar(tqdm_bar(step, total, point.seconds * 21, 0.095 / point.pace))
        log.steps, log.losses = (step,), (loss,)


@TRAINERS.add(
    "axolotl",
    "axolotl-ai-cloud/axolotl src/axolotl/core/trainers/base.py log",
    "{'loss': 1.1, ..., 'ppl': 3.0, 'memory/max_active (GiB)': 21.1, 'tokens/train_per_sec_per_gpu': 2301.2, 'epoch': 0.5}",
    filters_nan=True,
)
def axolotl(run: Run, log: Log) -> None:
    stamp = f"{run.began:%Y-%m-%d %H:%M:%S},511"
    log.line(f"[{stamp}] [INFO] [axolotl.cli.config.load_cfg:248] [PID:991] config:")
    log.block("""
        {
          "activation_offloading": false,
          "learning_rate": 0.0002,
          "loss_watchdog_threshold": 5.0,
          "loss_watchdog_patience": 3,
          "micro_batch_size": 2,
          "num_epochs": 2.0
        }
    """)
    total = 600
    for point in run.points(total // 3, 1.6, 0.8, 0.05):
        step = (point.idx + 1) * 3
        loss = 0.0 if math.isnan(point.loss) else round(point.loss, 4)
        values = {
            "loss": loss,
            "grad_norm": point.grad_norm,
            "learning_rate": 2e-4 * point.lr_share,
            "ppl": round(math.exp(loss), 5),
        }
        values |= {
            "memory/max_active (GiB)": 21.08,
            "memory/max_allocated (GiB)": 20.93,
            "memory/device_reserved (GiB)": 24.6,
        }
        values |= {
            "tokens/train_per_sec_per_gpu": round(2301.2 / point.pace, 2),
            "tokens/total": step * 8192,
            "epoch": round(step / 300, 2),
        }
        log.bar(tqdm_bar(step, total, point.seconds * 8, 0.37 / point.pace))
        log.bar(" " * 60 + "\r" + str(values) + "\n")
        log.steps, log.losses = (step,), (loss,)
    if run.finished:
        log.line(
            "[2026-03-02 12:00:00,000] [INFO] [axolotl.train.save_trained_model:228] [PID:991] Training completed!"
        )


@TRAINERS.add(
    "opennmt",
    "OpenNMT/OpenNMT-py onmt/utils/statistics.py Statistics.output",
    '"Step %s; acc: %2.1f; ppl: %5.1f; xent: %2.1f; lr: %7.5f; sents: %7.0f; bsz: %4.0f/%4.0f/%2.0f; %3.0f/%3.0f tok/s; %6.0f sec;"',
)
def opennmt(run: Run, log: Log) -> None:
    for point in run.points(200, 8.9, 2.1, 0.01):
        step = (point.idx + 1) * 100
        log.line(
            f"[{run.at(point.seconds * 20):%Y-%m-%d %H:%M:%S},612 INFO] Step {step:2d}/{20000:5d}; acc: {100 * point.accuracy:2.1f}; "
            f"ppl: {math.exp(min(point.loss, 80)):5.1f}; xent: {point.loss:2.1f}; lr: {2e-3 * point.lr_share:7.5f}; sents: {61234:7.0f}; bsz: 3711/3842/77; "
            f"{36671 / point.pace:3.0f}/{37955 / point.pace:3.0f} tok/s; {point.seconds * 20:6.0f} sec;"
        )
        log.steps, log.losses, log.tolerance = (
            (step,),
            (round(point.loss, 1), math.exp(min(point.loss, 80))),
            0.03,
        )


@TRAINERS.add(
    "pytorch-wordlm",
    "pytorch/examples word_language_model/main.py",
    '"| epoch {:3d} | {:5d}/{:5d} batches | lr {:02.2f} | ms/batch {:5.2f} | loss {:5.2f} | ppl {:8.2f}"',
    errors="old_torch",
)
def pytorch_wordlm(run: Run, log: Log) -> None:
    batches, shown = 2983, 14
    for point in run.points(12 * shown, 7.1, 4.2, 0.01):
        epoch, inside = divmod(point.idx, shown)
        done = (inside + 1) * 200
        log.line(
            f"| epoch {epoch + 1:3d} | {done:5d}/{batches:5d} batches | lr 20.00 | ms/batch {13.2 * point.pace:5.2f} | loss {point.loss:5.2f} | "
            f"ppl {math.exp(min(point.loss, 80)):8.2f}"
        )
        log.steps, log.losses = (epoch * batches + done, done), (point.loss,)
        if inside == shown - 1:
            log.line("-" * 89)
            log.line(
                f"| end of epoch {epoch + 1:3d} | time: 41.21s | valid loss {point.valid_loss:5.2f} | valid ppl {math.exp(min(point.valid_loss, 80)):8.2f}"
            )
            log.line("-" * 89)
            log.steps += (epoch + 1,)
    if run.finished:
        log.lines(
            "=" * 89, f"| End of training | test loss {point.valid_loss:5.2f} | test ppl    81.20", "=" * 89
        )
        log.losses += (point.valid_loss,)
