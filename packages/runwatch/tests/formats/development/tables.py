"""Tables of metrics, boosting libraries and what classical toolkits print."""
# ruff: noqa: E501  (lines of logs are as long as the programs write them)

from ..simulation import Log, Registry, Run

TRAINERS = Registry()


@TRAINERS.add(
    "fastai-csv",
    "fastai/fastai fastai/callback/progress.py CSVLogger, fastai/learner.py Recorder",
    "history.csv: epoch,train_loss,valid_loss,accuracy,time with times such as 01:23",
    file_name="history.csv",
    errors=None,
)
def fastai_csv(run: Run, log: Log) -> None:
    log.line("epoch,train_loss,valid_loss,accuracy,time")
    for point in run.points(60, 2.3, 0.4, 0.01):
        log.line(
            f"{point.idx},{point.loss},{point.valid_loss},{point.accuracy},01:{int(10 + 9 * point.draw):02d}"
        )
        log.steps, log.losses = (point.idx, point.idx + 1), (point.loss,)


@TRAINERS.add(
    "lightning-csv",
    "Lightning-AI/pytorch-lightning src/lightning/fabric/loggers/csv_logs.py _ExperimentWriter",
    "metrics.csv: sorted keys, sparse rows: epoch,lr-AdamW,step,train_loss_epoch,train_loss_step,val_loss",
    file_name="metrics.csv",
    errors=None,
)
def lightning_csv(run: Run, log: Log) -> None:
    log.line("epoch,lr-AdamW,step,train_loss_epoch,train_loss_step,val_acc,val_loss")
    for point in run.points(300, 4.6, 1.1, 0.03):
        epoch, inside = divmod(point.idx, 20)
        step = point.idx * 50 + 49
        log.line(f",{3e-4 * point.lr_share},{step},,,,")
        log.line(f"{epoch},,{step},,{point.loss},,")
        log.steps, log.losses = (step,), (point.loss,)
        if inside == 19:
            log.line(f"{epoch},,{step},,,{point.accuracy},{point.valid_loss}")
            log.line(f"{epoch},,{step},{point.loss * 1.01},,,")
            log.losses += (point.loss * 1.01,)


@TRAINERS.add(
    "mdlm",
    "kuleshov-group/mdlm diffusion.py (self.log of trainer/loss, val/nll), with Lightning's CSVLogger",
    "metrics.csv: epoch,lr-AdamW,step,train/bpd,train/nll,train/ppl,trainer/loss,val/bpd,val/nll,val/ppl",
    file_name="metrics.csv",
    errors=None,
)
def mdlm(run: Run, log: Log) -> None:
    log.line("epoch,lr-AdamW,step,train/bpd,train/nll,train/ppl,trainer/loss,val/bpd,val/nll,val/ppl")
    for point in run.points(240, 10.9, 3.6, 0.05):
        step = point.idx * 10 + 9
        log.line(f"0,,{step},,,,{point.loss},,,")
        log.line(f",{3e-4 * point.lr_share},{step},,,,,,,")
        if point.idx % 60 == 59:
            nll = point.valid_loss
            log.line(f"0,,{step},,,,,{nll / 0.693},{nll},{2.718 ** min(nll, 50)}")
        log.steps, log.losses = (step,), (point.loss,)


@TRAINERS.add(
    "xgboost",
    "dmlc/xgboost python-package/xgboost/callback.py EvaluationMonitor",
    '"[{}]\\t{}-{}:{:.5f}\\t...": "[12]\\ttrain-logloss:0.31250\\teval-logloss:0.33110"',
    errors="boosting",
)
def xgboost(run: Run, log: Log) -> None:
    log.line("[10:15:07] WARNING: /workspace/src/learner.cc:740: ")
    log.line('Parameters: { "n_estimators" } are not used.')
    for point in run.points(200, 0.66, 0.21, 0.002):
        log.line(f"[{point.idx}]\ttrain-logloss:{point.loss:.5f}\teval-logloss:{point.valid_loss:.5f}")
        log.steps, log.losses = (point.idx,), (point.loss, point.valid_loss)


@TRAINERS.add(
    "lightgbm",
    "microsoft/LightGBM python-package/lightgbm/callback.py _format_eval_result, log_evaluation",
    '"[{}]\\t{}\'s {}: {:g}\\t...": "[10]\\ttraining\'s l2: 0.1923\\tvalid_1\'s l2: 0.2011"',
    errors="boosting",
)
def lightgbm(run: Run, log: Log) -> None:
    log.lines(
        "[LightGBM] [Info] Auto-choosing row-wise multi-threading, the overhead of testing was 0.001432 seconds.",
        "[LightGBM] [Info] Total Bins 6132",
        "[LightGBM] [Info] Number of data points in the train set: 7000, number of used features: 28",
        "[LightGBM] [Info] Start training from score 0.530600",
        "Training until validation scores don't improve for 50 rounds",
    )
    for point in run.points(150, 0.248, 0.13, 0.002):
        log.line(f"[{point.idx + 1}]\ttraining's l2: {point.loss:g}\tvalid_1's l2: {point.valid_loss:g}")
        log.steps, log.losses = (point.idx + 1,), (point.loss, point.valid_loss)
    if run.scenario == "healthy":
        log.line("Did not meet early stopping. Best iteration is:")
        log.line(f"[150]\ttraining's l2: {log.losses[0]:g}\tvalid_1's l2: {log.losses[1]:g}")


@TRAINERS.add(
    "catboost",
    "catboost/catboost catboost/libs/loggers/logger.h TConsoleLoggingBackend",
    '"12:\\tlearn: 0.4318262\\ttest: 0.4402113\\tbest: 0.4402113 (12)\\ttotal: 312ms\\tremaining: 11.7s"',
    errors="boosting",
)
def catboost(run: Run, log: Log) -> None:
    log.line("Learning rate set to 0.061")
    best, best_idx = float("inf"), 0
    for point in run.points(300, 0.69, 0.24, 0.001):
        if point.valid_loss < best:
            best, best_idx = point.valid_loss, point.idx
        log.line(
            f"{point.idx}:\tlearn: {point.loss:.7f}\ttest: {point.valid_loss:.7f}\tbest: {best:.7f} ({best_idx})\t"
            f"total: {point.seconds * 0.024:.3g}s\tremaining: {(300 - point.idx) * 0.024:.3g}s"
        )
        log.steps, log.losses = (point.idx,), (point.loss, point.valid_loss)
    if run.scenario == "healthy":
        log.lines(
            "",
            f"bestTest = {best:.10g}",
            f"bestIteration = {best_idx}",
            "",
            "Shrink model to first 297 iterations.",
        )


@TRAINERS.add(
    "sklearn-mlp",
    "scikit-learn/scikit-learn sklearn/neural_network/_multilayer_perceptron.py",
    '"Iteration %d, loss = %.8f"',
    errors="plain",
)
def sklearn_mlp(run: Run, log: Log) -> None:
    for point in run.points(120, 2.31, 0.11, 0.004):
        log.line(f"Iteration {point.idx + 1}, loss = {point.loss:.8f}")
        log.steps, log.losses = (point.idx + 1,), (point.loss,)
    if run.scenario == "healthy":
        log.line("Training loss did not improve more than tol=0.000100 for 10 consecutive epochs. Stopping.")


@TRAINERS.add(
    "spacy",
    "explosion/spaCy spacy/training/loggers.py console_logger",
    'table "E    #       LOSS TOK2VEC  LOSS NER  ENTS_F  ENTS_P  ENTS_R  SCORE"; losses are sums since the row before',
    errors="plain",
    may_warn=("M102",),
)
def spacy(run: Run, log: Log) -> None:
    blue, end = "\x1b[38;5;4m", "\x1b[0m"
    log.lines(f"{blue}ℹ Saving to output directory: output{end}", f"{blue}ℹ Using CPU{end}", "\x1b[1m")
    log.lines("=========================== Initializing pipeline ===========================\x1b[0m")
    log.lines("\x1b[38;5;2m✔ Initialized pipeline\x1b[0m", "\x1b[1m")
    log.lines("============================= Training pipeline =============================\x1b[0m")
    log.lines(f"{blue}ℹ Pipeline: ['tok2vec', 'ner']{end}", f"{blue}ℹ Initial learn rate: 0.001{end}")
    log.line("E    #       LOSS TOK2VEC  LOSS NER  ENTS_F  ENTS_P  ENTS_R  SCORE ")
    log.line("---  ------  ------------  --------  ------  ------  ------  ------")
    for point in run.points(60, 1900, 240, 0.03):
        step = point.idx * 200
        share = 0.02 if point.idx == 0 else 1.0  # the first row covers a single step
        ner, tok2vec, score = point.loss * share, point.loss * share * 0.3, 100 * point.accuracy
        log.line(
            f"{point.idx // 4:3d}  {step:6d}  {tok2vec:12.2f}  {ner:8.2f}  {score:6.2f}  {score + 0.3:6.2f}  {score - 0.3:6.2f}  "
            f"{score / 100:6.2f}"
        )
        log.steps, log.losses = (step,), (ner, tok2vec, ner + tok2vec)
    if run.finished:
        log.line("\x1b[38;5;2m✔ Saved pipeline to output directory\x1b[0m")
        log.line("output/model-last")


@TRAINERS.add(
    "keras-bar",
    "keras-team/keras keras/src/utils/progbar.py Progbar.update",
    '"\\b...\\r" + bold "  1/782" + colours + " 1:23 107ms/step - accuracy: 0.1 - loss: 2.31"; val_loss at the end of an epoch',
    errors="tensorflow",
)
def keras_bar(run: Run, log: Log) -> None:
    log.line(
        "2026-03-02 10:15:01.118423: I tensorflow/core/platform/cpu_feature_guard.cc:210] This TensorFlow binary is optimized."
    )
    epochs, shown, batches = 15, 20, 400
    width, losses = 0, [0.0]
    for point in run.points(epochs * shown, 2.3, 0.35, 0.02):
        epoch, inside = divmod(point.idx, shown)
        if inside == 0:
            log.line(f"Epoch {epoch + 1}/{epochs}")
            losses, width = [], 0
        losses.append(point.loss)
        mean = sum(losses) / len(losses)
        done = (inside + 1) * batches // shown
        bars = done * 20 // batches
        bar = (
            f"\x1b[1m{done:3d}/{batches}\x1b[0m \x1b[32m{'━' * bars}\x1b[0m\x1b[37m{'━' * (20 - bars)}\x1b[0m"
        )
        info = f" \x1b[1m{(batches - done) // 30}s\x1b[0m 31ms/step - accuracy: {point.accuracy:.4f} - loss: {mean:.4f}"
        if inside == shown - 1:
            info += f" - val_accuracy: {point.accuracy:.4f} - val_loss: {point.valid_loss:.4f} - learning_rate: 0.0010"
        log.parts.append("\b" * width + "\r" + bar + info)
        width = len(bar) + len(info) - 34
        if inside == shown - 1:
            log.line()
        log.steps, log.losses = (epoch * batches + done, done, epoch + 1), (mean,)


@TRAINERS.add(
    "yolov5-csv",
    "ultralytics/yolov5 utils/loggers/__init__.py on_fit_epoch_end",
    'results.csv with padded columns: "%20s," header, "%20.5g," rows: epoch, train/box_loss, train/obj_loss, ..., x/lr0',
    file_name="results.csv",
    errors=None,
)
def yolov5_csv(run: Run, log: Log) -> None:
    names = [
        "epoch",
        *(f"train/{kind}_loss" for kind in ("box", "obj", "cls")),
        "metrics/precision",
        "metrics/recall",
    ]
    names += [
        "metrics/mAP_0.5",
        "metrics/mAP_0.5:0.95",
        *(f"val/{kind}_loss" for kind in ("box", "obj", "cls")),
        "x/lr0",
        "x/lr1",
        "x/lr2",
    ]
    log.line(",".join(f"{name:>20s}" for name in names))
    for point in run.points(80, 0.12, 0.025, 0.01):
        losses = (point.loss, point.loss * 0.4, point.loss * 0.2)
        row = [
            point.idx,
            *losses,
            *[point.accuracy] * 4,
            *(value * 1.02 for value in losses),
            *[0.01 * point.lr_share] * 3,
        ]
        log.line(",".join(f"{value:20.5g}" for value in row))
        log.steps, log.losses = (point.idx, point.idx + 1), (*losses, sum(losses))
