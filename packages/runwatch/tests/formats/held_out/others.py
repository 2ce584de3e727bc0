"""Toolkits for speech and text, Lightning, Keras, Composer, fastai and reinforcement learning."""
# ruff: noqa: E501  (lines of logs are as long as the programs write them)

import json

from ..bars import tqdm_bar
from ..simulation import Log, Registry, Run

TRAINERS = Registry()


@TRAINERS.add(
    "lightning-bar",
    "Lightning-AI/pytorch-lightning src/lightning/pytorch/callbacks/progress/tqdm_progress.py",
    '"Epoch 3:  42%|████▏     | 42/100 [00:21<00:29,  1.98it/s, v_num=3, train_loss_step=2.310, val_loss=2.400, train_loss_epoch=2.500]"',
)
def lightning_bar(run: Run, log: Log) -> None:
    log.block("""
        GPU available: True (cuda), used: True
        TPU available: False, using: 0 TPU cores
        LOCAL_RANK: 0 - CUDA_VISIBLE_DEVICES: [0]

          | Name    | Type               | Params | Mode
        -------------------------------------------------------
        0 | model   | Encoder            | 11.2 M | train
        1 | loss_fn | CrossEntropyLoss   | 0      | train
        -------------------------------------------------------
        11.2 M    Trainable params
        44.701    Total estimated model params size (MB)
    """)
    epochs, shown, batches = 12, 25, 250
    tail, losses = "", [0.0]
    log.bar(tqdm_bar(2, 2, 0, 11.2, "Sanity Checking DataLoader 0"))
    for point in run.points(epochs * shown, 4.6, 0.9, 0.02):
        epoch, inside = divmod(point.idx, shown)
        losses = [point.loss] if inside == 0 else [*losses, point.loss]
        done = (inside + 1) * batches // shown
        postfix = f"v_num=3, train_loss_step={point.loss:.3f}{tail}"
        log.bar(tqdm_bar(done, batches, done / 19, 19.0 / point.pace, f"Epoch {epoch}", postfix))
        log.steps, log.losses = (epoch * batches + done, done), (point.loss,)
        if inside == shown - 1:
            log.bar(tqdm_bar(20, 40, 1, 40.0, "Validation DataLoader 0"))
            mean = sum(losses) / len(losses)
            tail = f", val_loss={point.valid_loss:.3f}, train_loss_epoch={mean:.3f}"
            log.bar(
                tqdm_bar(
                    batches,
                    batches,
                    batches / 19,
                    19.0,
                    f"Epoch {epoch}",
                    f"v_num=3, train_loss_step={point.loss:.3f}{tail}",
                )
            )
            log.losses += (mean,)
    if run.finished:
        log.line("\n`Trainer.fit` stopped: `max_epochs=12` reached.")


@TRAINERS.add(
    "keras-csv",
    "keras-team/keras keras/src/callbacks/csv_logger.py CSVLogger",
    "training.log: epoch,accuracy,loss,val_accuracy,val_loss with the metrics sorted",
    file_name="training.log",
    errors=None,
)
def keras_csv(run: Run, log: Log) -> None:
    log.line("epoch,accuracy,learning_rate,loss,val_accuracy,val_loss")
    for point in run.points(60, 2.3, 0.4, 0.01):
        log.line(
            f"{point.idx},{point.accuracy},{1e-3 * point.lr_share},{point.loss},{point.accuracy - 0.01},{point.valid_loss}"
        )
        log.steps, log.losses = (point.idx, point.idx + 1), (point.loss,)


@TRAINERS.add(
    "fastai-console",
    "fastai/fastprogress fastprogress/fastprogress.py ConsoleMasterBar, ConsoleProgressBar",
    '"epoch     train_loss  valid_loss  accuracy  time", rows padded to the names, "\\rEpoch 1/10 : |███---| 12.34% [123/997 00:10<01:12 2.3451]" between',
)
def fastai_console(run: Run, log: Log) -> None:
    names = [name.ljust(8) for name in ("epoch", "train_loss", "valid_loss", "accuracy", "time")]
    log.line("  ".join(names))
    epochs = 40
    for point in run.points(epochs, 2.3, 0.4, 0.01):
        for share in (0.25, 0.5, 0.75, 1.0):
            filled = int(40 * share)
            log.bar(
                f"Epoch {point.idx + 1}/{epochs} : |{'█' * filled}{'-' * (40 - filled)}| {100 * share:.2f}% [{int(200 * share)}/200 00:{int(12 * share):02d}<00:12 {point.loss * 1.01:.4f}]"
            )
        log.bar(" " * 110 + "\r")
        row = [
            str(point.idx),
            f"{point.loss:.6f}",
            f"{point.valid_loss:.6f}",
            f"{point.accuracy:.6f}",
            "00:14",
        ]
        log.line(
            "".join(text + " " * (2 + len(name) - len(text)) for text, name in zip(row, names, strict=True))
        )
        log.steps, log.losses, log.tolerance = (
            (point.idx, point.idx + 1, (point.idx + 1) * 200, 200),
            (point.loss,),
            0.02,
        )


@TRAINERS.add(
    "composer",
    "mosaicml/composer composer/loggers/console_logger.py log_to_console",
    '"[epoch=1][batch=10/500]:" then one "\\t Train loss/train/total: 2.3025" line per metric',
)
def composer(run: Run, log: Log) -> None:
    log.lines(
        "******************************",
        "Config:",
        "composer_version: 0.30.0",
        "num_gpus_per_node: 8",
        "rank_zero_seed: 17",
        "",
        "******************************",
    )
    batches, shown = 500, 20
    for point in run.points(10 * shown, 10.8, 2.9, 0.01):
        epoch, inside = divmod(point.idx, shown)
        done, step = (inside + 1) * 25, (point.idx + 1) * 25
        log.line(f"[epoch={epoch + 1}][batch={done}/{batches}]:")
        values = {
            "time/epoch": str(epoch),
            "time/batch": str(step - 1),
            "time/batch_in_epoch": str(done - 1),
            "time/sample": str(step * 256),
        }
        values |= {
            "memory/peak_allocated_mem": "31.4120",
            "trainer/device_train_microbatch_size": "8",
            "loss/train/total": f"{point.loss:.4f}",
        }
        values |= {
            "metrics/train/LanguageCrossEntropy": f"{point.loss:.4f}",
            "throughput/batches_per_sec": f"{1.91 / point.pace:.4f}",
            "throughput/tokens_per_sec": f"{1001241.1 / point.pace:.4f}",
        }
        values |= {
            "time/remaining_estimate": "0.3512",
            "lr-DecoupledAdamW/group0": f"{6e-4 * point.lr_share:.4f}",
        }
        log.lines(*(f"\t Train {name}: {value}" for name, value in values.items()))
        log.steps, log.losses = (step, step - 1, done), (point.loss,)
        if inside == shown - 1:
            log.line(
                f"[Eval batch=40/40] Eval on eval data:\n\t Eval metrics/eval/LanguageCrossEntropy: {point.valid_loss:.4f}"
            )


@TRAINERS.add(
    "espnet",
    "espnet/espnet espnet2/train/reporter.py SubReporter.log_message, Reporter.log_message",
    '"1epoch:train:1-500batch: iter_time=.., loss_ctc=210.1, loss_att=90.2, acc=0.1, loss=120.2, ..., train_time=0.5"; "1epoch results: [train] ..., [valid] ..."',
)
def espnet(run: Run, log: Log) -> None:
    def number(value: float) -> str:
        return f"{value:.3f}" if 1e-3 < abs(value) <= 1e3 else f"{value:.3e}"

    shown, batches = 10, 5000
    for point in run.points(20 * shown, 130.0, 14.0, 0.015):
        epoch, inside = divmod(point.idx, shown)
        now = f"[gpu07] {run.at(point.seconds * 150):%Y-%m-%d %H:%M:%S},{int(point.draw * 1000):03d} (trainer"
        parts = {
            "iter_time": 0.0002,
            "forward_time": 0.121,
            "loss_ctc": point.loss * 1.2,
            "loss_att": point.loss * 0.9,
            "acc": point.accuracy,
        }
        parts |= {
            "loss": point.loss,
            "backward_time": 0.132,
            "grad_norm": point.grad_norm * 20,
            "clip": 100.0,
            "loss_scale": 65536.0,
        }
        parts |= {
            "optim_step_time": 0.041,
            "optim0_lr0": 2e-3 * point.lr_share,
            "train_time": 0.301 * point.pace,
        }
        text = ", ".join(f"{name}={number(value)}" for name, value in parts.items())
        log.line(
            f"{now}:779) INFO: {epoch + 1}epoch:train:{inside * 500 + 1}-{inside * 500 + 500}batch: {text}"
        )
        done = (inside + 1) * 500
        log.steps, log.losses = (
            (epoch * batches + done, done, done - 499, epoch * batches + done - 499, epoch + 1),
            (point.loss,),
        )
        if inside == shown - 1:
            log.line(
                f"{now}:365) INFO: {epoch + 1}epoch results: [train] {text}, time=25 minutes and 3.1 seconds, total_count={(epoch + 1) * batches}, gpu_max_cached_mem_GB=21.1, "
                f"[valid] loss_ctc={number(point.valid_loss * 1.2)}, loss_att={number(point.valid_loss * 0.9)}, acc={number(point.accuracy)}, loss={number(point.valid_loss)}, time=31.3 seconds"
            )
            log.line(f"{now}:421) INFO: The best model has been updated: valid.acc")
            log.losses += (point.valid_loss,)
    if run.finished:
        log.line(
            "[gpu07] 2026-03-03 01:02:03,004 (trainer:499) INFO: The training was finished at 20 epochs "
        )


@TRAINERS.add(
    "kaldi",
    "kaldi-asr/kaldi src/nnet3/nnet-training.cc ObjectiveFunctionInfo",
    "\"LOG (nnet3-train:PrintStatsForThisPhase():nnet-training.cc:278) Average objective function for 'output' for minibatches 0-9 is -1.93 over 12800 frames.\": an objective, larger is better",
    has_loss=False,
    errors="plain",
)
def kaldi(run: Run, log: Log) -> None:
    log.line(
        "nnet3-train --use-gpu=yes --momentum=0.0 --max-param-change=2.0 exp/nnet3/12.raw 'ark,bg:nnet3-copy-egs ark:egs.1.ark ark:- |' exp/nnet3/13.1.raw "
    )
    log.line(
        "LOG (nnet3-train[5.5]:SelectGpuId():cu-device.cc:223) CUDA setup operating under Compute Exclusive Mode."
    )
    for point in run.points(150, 5.1, 1.2, 0.01):
        log.line(
            f"LOG (nnet3-train[5.5]:PrintStatsForThisPhase():nnet-training.cc:278) Average objective function for 'output' for minibatches {point.idx * 10}-{point.idx * 10 + 9} is "
            f"{-point.loss:.5g} over 12800 frames."
        )
    if run.finished:
        log.line(
            "LOG (nnet3-train[5.5]:PrintTotalStats():nnet-training.cc:317) Overall average objective function for 'output' is -1.91 over 1.92e+06 frames."
        )


@TRAINERS.add(
    "speechbrain",
    "speechbrain/speechbrain speechbrain/utils/train_logger.py FileTrainLogger, core.py (bar)",
    '"epoch: 1, lr: 1.00e+00 - train loss: 2.31 - valid loss: 2.10, valid CER: 30.11" after a bar with train_loss=...',
)
def speechbrain(run: Run, log: Log) -> None:
    def number(value: float) -> str:
        return f"{value:.2f}" if 1.0 < value < 100.0 else f"{value:.2e}"

    log.lines(
        "speechbrain.core - Beginning experiment!", "speechbrain.core - 7.8M trainable parameters in ASR"
    )
    batches = 300
    for point in run.points(45, 6.1, 0.42, 0.01):
        for share in (0.5, 1.0):
            done = int(batches * share)
            log.bar(tqdm_bar(done, batches, done / 4.1, 4.1 / point.pace, "", f"train_loss={point.loss:.3g}"))
        log.line()
        log.bar(tqdm_bar(31, 31, 5, 6.1) + "\n")
        log.line(
            f"speechbrain.utils.train_logger - epoch: {point.idx + 1}, lr: {number(point.lr_share)}, steps: {(point.idx + 1) * batches} - train loss: {number(point.loss)} - "
            f"valid loss: {number(point.valid_loss)}, valid CER: {number(100 - 100 * point.accuracy)}, valid WER: {number(100 - 90 * point.accuracy)}"
        )
        log.steps, log.losses = ((point.idx + 1) * batches, point.idx + 1, batches), (point.loss,)
        log.tolerance = 0.02


@TRAINERS.add(
    "flair",
    "flairNLP/flair flair/trainers/trainer.py",
    '"epoch 1 - iter 14/146 - loss 2.12345678 - time (sec): 1.20 - samples/sec: 2000.10 - lr: 0.100000 - momentum: 0.000000"; "EPOCH 1 done: loss 1.2345 - lr: 0.1"',
)
def flair(run: Run, log: Log) -> None:
    def say(seconds: float, text: str) -> None:
        log.line(f"{run.at(seconds):%Y-%m-%d %H:%M:%S},{int(seconds * 7) % 1000:03d} {text}")

    say(0, "Training Params:")
    say(0, ' - learning_rate: "0.1" ')
    say(0, ' - mini_batch_size: "32"')
    shown, batches = 10, 146
    for point in run.points(25 * shown, 2.2, 0.11, 0.015):
        epoch, inside = divmod(point.idx, shown)
        done, seconds = (inside + 1) * 14, point.seconds * 3
        say(
            seconds,
            f"epoch {epoch + 1} - iter {done}/{batches} - loss {point.loss:.8f} - time (sec): {inside * 3.0 + 3:.2f} - samples/sec: {2104.2 / point.pace:.2f} - lr: 0.100000 - momentum: 0.000000",
        )
        log.steps, log.losses, log.rate = (epoch * batches + done, done), (point.loss,), 2104.2 / point.pace
        if inside == shown - 1:
            say(seconds, "-" * 100)
            say(seconds, f"EPOCH {epoch + 1} done: loss {point.loss:.4f} - lr: 0.100000")
            say(seconds, f"DEV : loss {point.valid_loss} - f1-score (micro avg)  {point.accuracy:.4f}")
            say(seconds, " - 0 epochs without improvement")
            say(seconds, "saving best model")
            log.steps, log.losses = (*log.steps, epoch + 1), (point.loss, point.valid_loss)


@TRAINERS.add(
    "rllib",
    "ray-project/ray python/ray/tune/logger/json.py, rllib/core/learner/learner.py",
    'result.json: one object a line, {"learners": {"default_policy": {"total_loss": .., "policy_loss": .., "vf_loss": ..}}, "training_iteration": 1, ...}',
    file_name="result.json",
    errors=None,
)
def rllib(run: Run, log: Log) -> None:
    for point in run.points(120, 9.1, 1.4, 0.08):
        iteration = point.idx + 1
        learner = {
            "total_loss": point.loss,
            "policy_loss": -0.02 * point.draw,
            "vf_loss": point.loss * 1.01,
            "entropy": 0.61,
            "mean_kl_loss": 0.009,
        }
        learner |= {
            "num_module_steps_trained": 4000 * iteration,
            "gradients_default_optimizer_global_norm": point.grad_norm,
        }
        result = {
            "timers": {"training_iteration": 4.1 * point.pace, "learner_update_timer": 2.9},
            "env_runners": {
                "episode_return_mean": 20 + 400 * point.accuracy,
                "num_env_steps_sampled_lifetime": 4000 * iteration,
            },
            "learners": {"default_policy": learner, "__all_modules__": {"num_env_steps_trained": 4000}},
            "done": iteration == 120,
            "training_iteration": iteration,
            "trial_id": "a1b2c_00000",
            "timestamp": int(run.at(point.seconds * 4).timestamp()),
            "time_this_iter_s": 4.1 * point.pace,
            "time_total_s": point.seconds * 4.1,
            "hostname": "head",
            "config": {"lr": 3e-4, "vf_loss_coeff": 1.0, "train_batch_size": 4000, "gamma": 0.99},
            "iterations_since_restore": iteration,
            "perf": {"cpu_util_percent": 31.2, "ram_util_percent": 18.4},
        }
        log.line(json.dumps(result))
        log.steps, log.losses = (iteration, 4000 * iteration), (point.loss,)


@TRAINERS.add(
    "mmengine-json",
    "open-mmlab/mmengine mmengine/visualization/vis_backend.py LocalVisBackend (scalars.json)",
    '{"lr": 0.1, "data_time": 0.01, "loss": 2.1, "time": 0.1, "epoch": 1, "iter": 50, "memory": 521, "step": 50} a line',
    file_name="scalars.json",
    errors=None,
)
def mmengine_json(run: Run, log: Log) -> None:
    for point in run.points(210, 2.3, 0.2, 0.02):
        step = (point.idx + 1) * 50
        values = {
            "lr": 0.1 * point.lr_share,
            "data_time": 0.013,
            "loss": point.loss,
            "time": 0.08 * point.pace,
            "epoch": 1 + point.idx // 7,
        }
        log.line(json.dumps(values | {"iter": step, "memory": 521, "step": step}))
        log.steps, log.losses = (step,), (point.loss,)
        if point.idx % 7 == 6:
            log.line(
                json.dumps(
                    {
                        "accuracy/top1": 100 * point.accuracy,
                        "data_time": 0.02,
                        "time": 0.04,
                        "step": point.idx // 7 + 1,
                    }
                )
            )
            log.steps += (point.idx // 7 + 1,)


@TRAINERS.add(
    "detectron2-json",
    "facebookresearch/detectron2 detectron2/utils/events.py JSONWriter (metrics.json)",
    '{"data_time": 0.008, "iteration": 19, "loss_box_reg": 0.05, "loss_cls": 0.5, "lr": 0.007, "time": 0.25, "total_loss": 1.9} a line',
    file_name="metrics.json",
    errors=None,
)
def detectron2_json(run: Run, log: Log) -> None:
    for point in run.points(250, 4.4, 0.6, 0.03):
        step = point.idx * 20 + 19
        values = {
            "data_time": 0.008,
            "eta_seconds": (5000 - step) * 0.31,
            "fast_rcnn/cls_accuracy": point.accuracy,
            "iteration": step,
        }
        values |= {
            "loss_box_reg": point.loss * 0.3,
            "loss_cls": point.loss * 0.4,
            "lr": 0.02 * point.lr_share,
            "time": 0.31 * point.pace,
        }
        log.line(json.dumps(values | {"total_loss": point.loss}))
        log.steps, log.losses = (step,), (point.loss,)
