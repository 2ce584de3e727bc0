"""Trainers of large language models from scratch."""
# ruff: noqa: E501  (lines of logs are as long as the programs write them)

import math

from ..bars import clock
from ..simulation import Log, Registry, Run

TRAINERS = Registry()


@TRAINERS.add(
    "nanogpt",
    "karpathy/nanoGPT train.py",
    '"step {}: train loss {:.4f}, val loss {:.4f}" and "iter {}: loss {:.4f}, time {:.2f}ms, mfu {:.2f}%"',
)
def nanogpt(run: Run, log: Log) -> None:
    log.lines(
        "Overriding config with config/train_shakespeare_char.py:",
        "learning_rate = 1e-3 # with baby networks can afford to go a bit higher",
        "max_iters = 5000",
        "eval_interval = 250 # keep frequent because we'll overfit",
        "tokens per iteration will be: 16,384",
        "number of parameters: 10.65M",
        "num decayed parameter tensors: 26, with 10,740,096 parameters",
    )
    for point in run.points(500, 4.25, 1.1, 0.02):
        step = point.idx * 10
        if step % 250 == 0:
            log.line(
                f"step {step}: train loss {point.valid_loss * 0.97:.4f}, val loss {point.valid_loss:.4f}"
            )
            log.line("saving checkpoint to out-shakespeare-char")
        mfu = -100.0 if point.idx < 5 else 17.4 / point.pace
        log.line(f"iter {step}: loss {point.loss:.4f}, time {21.3 * point.pace:.2f}ms, mfu {mfu:.2f}%")
        log.steps, log.losses = (step,), (point.loss,)


@TRAINERS.add(
    "litgpt",
    "Lightning-AI/litgpt litgpt/pretrain.py fit",
    '"Epoch {} | iter {} step {} | loss train: {:.3f}, val: {} | iter time: {:.2f} ms (step) remaining time: {}"',
)
def litgpt(run: Run, log: Log) -> None:
    log.block("""
        {'data': {'batch_size': 1, 'max_seq_length': 2048, 'val_split_fraction': 0.05},
         'eval': EvalArgs(interval=100, max_new_tokens=None, max_iters=100, initial_validation=False, final_validation=True),
         'train': TrainArgs(save_interval=1000, log_interval=1, global_batch_size=512, micro_batch_size=4, lr_warmup_steps=2000, max_norm=1.0),
         'seed': 42}
        Time to instantiate model: 0.05 seconds.
        Total parameters: 162,322,944
        Verifying settings ...
        Measured TFLOPs: 239.71
    """)
    valid = "n/a"
    for point in run.points(320, 10.9, 3.2, 0.015):
        iteration, step = (point.idx + 1) * 4, point.idx + 1
        log.line(
            f"Epoch 1 | iter {iteration} step {step} | loss train: {point.loss:.3f}, val: {valid} | iter time: {411.7 * point.pace:.2f} ms (step) "
            f"remaining time: {clock((320 - step) * 1.6)}"
        )
        log.steps, log.losses = (step, iteration), (point.loss,)
        if step % 100 == 0:
            valid = f"{point.valid_loss:.3f}"
            log.line(f"iter {iteration}: val loss {point.valid_loss:.4f}, val time: 5310.22 ms")
    if run.finished:
        log.lines(
            "----------------------------------------", "| Performance", "| - Total tokens  : 2,621,440"
        )
        log.lines("| - Training Time : 531.22 s", "| - Tok/sec       : 4934.76 tok/s", "| Memory Usage")
        log.line("| - Memory Used   : 21.31 GB")


@TRAINERS.add(
    "torchtitan",
    "pytorch/torchtitan torchtitan/components/metrics.py MetricsProcessor.log",
    '"step: {:2}  loss: {:8.5f}  grad_norm: {:7.4f}  memory: {:5.2f}GiB({:.2f}%)  tps: {:,}  tflops: {:,.2f}  mfu: {}", every part in colour',
)
def torchtitan(run: Run, log: Log) -> None:
    red, green, orange, turquoise, blue, cyan, magenta, reset = (
        f"\x1b[{code}m" for code in ("31", "32", "38;5;208", "38;5;45", "34", "36", "35", "39")
    )
    head = "[rank0]:[titan]"
    for text in (
        "Building device mesh with parallelism: dp_shard=8",
        "CUDA capacity: NVIDIA H100 with 94.99GiB memory",
    ):
        log.line(f"{head} {run.began:%Y-%m-%d %H:%M:%S},412 - root - INFO - {text}")
    for point in run.points(300, 12.2, 3.3, 0.01):
        step = 1 if point.idx == 0 else point.idx * 10
        now = f"{head} {run.at(point.seconds * 9):%Y-%m-%d %H:%M:%S},{int(point.draw * 1000):03d} - root - INFO - "
        log.line(
            f"{now}{red}step: {step:2}  {green}loss: {point.loss:8.5f}  {orange}grad_norm: {point.grad_norm:7.4f}  "
            f"{turquoise}memory: 47.62GiB(50.13%)  {blue}tps: {round(5761 / point.pace):,}  {cyan}tflops: {332.8 / point.pace:,.2f}  "
            f"{magenta}mfu: {33.65 / point.pace:.2f}%{reset}"
        )
        log.steps, log.losses, log.rate = (step,), (point.loss,), float(round(5761 / point.pace))
    if run.finished:
        log.line(f"{head} {run.at(2800):%Y-%m-%d %H:%M:%S},001 - root - INFO - Training completed")


@TRAINERS.add(
    "megatron-lm",
    "NVIDIA/Megatron-LM megatron/training/training.py training_log",
    '" iteration {:8d}/{:8d} | consumed samples: {:12d} | ... lm loss: {:.6E} | loss scale: {:.1f} | ... number of nan iterations: {:3d} |"; a loss that is not >= 0 is left out',
    filters_nan=True,
)
def megatron_lm(run: Run, log: Log) -> None:
    log.block("""
        using world size: 8, data-parallel size: 8, context-parallel size: 1, tensor-model-parallel size: 1
        ------------------------ arguments ------------------------
          adam_beta1 ...................................... 0.9
          clip_grad ....................................... 1.0
          initial_loss_scale .............................. 4294967296
          lr .............................................. 0.00015
          train_iters ..................................... 30000
        -------------------- end of arguments ---------------------
        setting number of microbatches to constant 4
        [before the start of training step] datetime: 2026-03-02 10:16:40
    """)
    for point in run.points(300, 10.9, 2.7, 0.01):
        step = (point.idx + 1) * 100
        lost = math.isnan(point.loss)
        text = f" [{run.at(point.seconds * 40):%Y-%m-%d %H:%M:%S.%f}] iteration {step:8d}/{30000:8d} | consumed samples: {step * 256:12d} |"
        text += f" elapsed time per iteration (ms): {401.3 * point.pace:.1f} | throughput per GPU (TFLOP/s/GPU): {412.9 / point.pace:.1f} |"
        text += f" learning rate: {1.5e-4 * point.lr_share:.6E} | global batch size: {256:5d} |"
        text += "" if lost else f" lm loss: {point.loss:.6E} |"
        text += (
            f" loss scale: 1.0 | grad norm: {point.grad_norm:.3f} | number of skipped iterations: {0:3d} |"
        )
        text += f" number of nan iterations: {100 if lost else 0:3d} |"
        log.line(text)
        log.steps, log.losses = (step,), (point.loss,)
        if step % 10000 == 0:
            log.line("-" * 96)
            log.line(
                f" validation loss at iteration {step} | lm loss value: {point.valid_loss:.6E} | lm loss PPL: 1.98E+01 | "
            )
            log.line("-" * 96)
            log.losses += (point.valid_loss,)
    if run.finished:
        log.line("[after training is done] datetime: 2026-03-02 13:49:12 ")


@TRAINERS.add(
    "deepspeed",
    "deepspeedai/DeepSpeed deepspeed/runtime/engine.py _report_progress, deepspeed/utils/timer.py, runtime/fp16/loss_scaler.py",
    '"[time] [INFO] [logging.py:107:log_dist] [Rank 0] step=10, skipped=0, lr=[...], mom=[...]" and samples per second: no loss',
    has_loss=False,
)
def deepspeed(run: Run, log: Log) -> None:
    for point in run.points(200):
        step, now = (
            (point.idx + 1) * 10,
            f"{run.at(point.seconds * 4):%Y-%m-%d %H:%M:%S},{int(point.draw * 1000):03d}",
        )
        skipped = max(0, step - 1400) if run.scenario == "nan" else 0
        if skipped:
            log.line(
                f"[{now}] [INFO] [loss_scaler.py:190:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 1, but hysteresis is 2. Reducing hysteresis to 1"
            )
        log.line(
            f"[{now}] [INFO] [logging.py:107:log_dist] [Rank 0] step={step}, skipped={skipped}, lr=[{1e-4 * point.lr_share}], mom=[[0.9, 0.999]]"
        )
        log.line(
            f"[{now}] [INFO] [timer.py:264:stop] epoch=0/micro_step={step * 4}/global_step={step}, RunningAvgSamplesPerSec=41.77, "
            f"CurrSamplesPerSec={41.8 / point.pace}, MemAllocated=10.94GB, MaxMemAllocated=31.07GB"
        )


@TRAINERS.add(
    "nanochat",
    "karpathy/nanochat scripts/base_train.py",
    '"step {:05d}/{:05d} ({:.2f}%) | loss: {:.6f} | lrm: {:.2f} | dt: {:.2f}ms | tok/sec: {:,} | bf16_mfu: {:.2f} | epoch: ..."; "Step 00250 | Validation bpb: 1.0"',
)
def nanochat(run: Run, log: Log) -> None:
    log.lines(
        "Vocab size: 65,536",
        "num_layers: 20",
        "Estimated FLOPs per token: 3.491758e+09",
        "Total number of training tokens: 1,000,000,000",
    )
    total = 400
    for point in run.points(total, 11.1, 2.8, 0.008):
        step = point.idx
        if step % 100 == 0:
            log.line(f"Step {step:05d} | Validation bpb: {point.valid_loss / 3:.6f}")
        if step % 200 == 199:
            log.line(f"Step {step:05d} | CORE metric: 0.1211")
            log.line("<|bos|>The capital of France is Paris, and the loss: of it was 3")
        log.line(
            f"step {step:05d}/{total:05d} ({100 * step / total:.2f}%) | loss: {point.loss:.6f} | lrm: {point.lr_share:.2f} | dt: {2210.3 * point.pace:.2f}ms | "
            f"tok/sec: {int(237208 / point.pace):,} | bf16_mfu: {47.1 / point.pace:.2f} | epoch: 1 | total time: {point.seconds * 2.2 / 60:.2f}m"
        )
        log.steps, log.losses, log.rate = (step,), (point.loss,), float(int(237208 / point.pace))
    if run.finished:
        log.lines(
            "Peak memory usage: 61822.41MiB", "Total training time: 14.71m", "Minimum validation bpb: 0.9412"
        )


@TRAINERS.add(
    "nemo",
    "NVIDIA/NeMo nemo/lightning/pytorch/callbacks/progress_printer.py",
    '"Training epoch 0, iteration 9/999 | lr: 3e-06 | global_batch_size: 512 | global_step: 9 | reduced_train_loss: 11.03 | train_step_timing in s: 3.2"',
)
def nemo(run: Run, log: Log) -> None:
    log.line(
        "[NeMo W 2026-03-02 10:15:07 nemo_logging:405] /opt/NeMo: UserWarning: `torch.cuda.amp.GradScaler` is deprecated."
    )
    for point in run.points(250, 11.1, 3.0, 0.01):
        step = point.idx * 4 + 3
        log.line(
            f"Training epoch 0, iteration {step}/999 | lr: {3e-4 * point.lr_share:.4g} | global_batch_size: 512 | global_step: {step} | "
            f"peak_memory_usage: 6.2e+10 | memory_allocated: 3.1e+10 | reduced_train_loss: {point.loss:.4g} | train_step_timing in s: {3.21 * point.pace:.4g} | consumed_samples: {(step + 1) * 512}"
        )
        log.steps, log.losses = (step,), (point.loss,)


@TRAINERS.add(
    "t5x",
    "google-research/t5x t5x/trainer.py MetricsManager, google/CommonLoopUtils clu/metric_writers/logging_writer.py",
    '"[%d] collection=train accuracy=0.1, cross_ent_loss=81234.1, learning_rate=0.01, loss=9.3, ..." through absl logging',
    errors="jax",
)
def t5x(run: Run, log: Log) -> None:
    for point in run.points(150, 9.9, 1.9, 0.01):
        step = (point.idx + 1) * 1000
        head = f"I0302 {run.at(point.seconds * 60):%H:%M:%S}.{int(point.draw * 1e6):06d} 139784 "
        log.line(f"{head}train.py:668] Epoch {point.idx} of 150")
        log.line(f"{head}train.py:679] Training for 1000 steps.")
        log.line(
            f"{head}logging_writer.py:49] [{step}] collection=train accuracy={point.accuracy:.6g}, cross_ent_loss={point.loss * 114000:.6g}, "
            f"learning_rate={0.01 * point.lr_share:.6g}, learning_rate/current={0.01 * point.lr_share:.6g}, loss={point.loss * 114688:.6g}, "
            f"loss_per_all_target_tokens={point.loss:.6g}, timing/seconds={59.8 * point.pace:.6g}, timing/steps_per_second={16.7 / point.pace:.6g}, z_loss={point.loss * 12:.6g}"
        )
        log.steps, log.losses = (step,), (point.loss * 114688, point.loss, point.loss * 114000)
    if run.finished:
        log.line("I0302 23:59:01.000001 139784 train.py:588] Finished.")
