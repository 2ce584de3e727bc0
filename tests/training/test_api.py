"""`mmldlm.train` and `mmldlm.list_runs` as a library: folders that are whole, warm starts, stops, other threads."""

import errno
import json
import logging
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch

import mmldlm
from mmldlm import durable
from mmldlm.api.runs import export_run, read_run
from mmldlm.api.train import plan_run
from mmldlm.checkpoint.files import published
from mmldlm.checkpoint.load import load_model, read_weights
from mmldlm.config.recipe import make_config
from mmldlm.errors import Interrupted
from tests.runs import write_recipe
from tests.stores import write_store

CPU = torch.device("cpu")
QUICK = {"train.steps": 4, "train.checkpoint_every": 2, "train.log_every": 1, "train.valid_every": 2}


@pytest.fixture(scope="module")
def recipe(store, tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("recipe"), store)


@pytest.fixture(scope="module")
def trained(recipe, tmp_path_factory):
    return mmldlm.train(recipe, run=tmp_path_factory.mktemp("runs") / "trained", overrides=QUICK)


def copy_of(run, folder: Path) -> Path:
    return Path(shutil.copytree(run.path, folder / "copy", symlinks=True))


def weights_of(model) -> dict[str, torch.Tensor]:
    return model.denoiser.state_dict()


def same(first, second) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def stop_at(step):
    def progress(done, total):
        if done == step:
            raise KeyboardInterrupt

    return progress


def test_a_run_knows_its_state_and_its_last_validation(trained):
    assert (trained.step, trained.steps, trained.finished, trained.state) == (4, 4, True, "finished")
    assert trained.headline == ("valid_loss", trained.metrics["valid_loss"])
    assert json.loads(json.dumps(trained.to_json()))["step"] == 4
    assert mmldlm.list_runs(trained.path.parent) == [trained]


def test_settings_come_as_mapping_words_config_or_nested_values(store, tmp_path, recipe):
    from mmldlm.config.recipe import config_to_dict, make_config

    as_mapping = make_config(recipe, QUICK | {"corruption.mode_weights": {"l2t": 1}, "optim.lr": 1e-3})
    words = [f"{key}={value}" for key, value in QUICK.items()]
    as_words = make_config(str(recipe), [*words, "corruption.mode_weights={l2t: 1}", "optim.lr=0.001"])
    assert as_mapping == as_words == make_config(as_words) == make_config(config_to_dict(as_words))
    assert make_config(recipe, "optim.lr=0.5").optim.lr == 0.5  # a single word
    with pytest.raises(
        mmldlm.UserError, match="recipe=None: a name, a file, a Config or a mapping is needed"
    ):
        make_config(None)
    assert make_config(as_words, {"train.seed": 5}).train.seed == 5
    with pytest.raises(mmldlm.UserError, match=r"overrides: .*optim\.lrr; did you mean optim\.lr"):
        make_config(recipe, {"optim.lrr": 1})


def test_settings_without_a_store_train_on_the_given_one(store, tmp_path):
    settings = {"model": {"preset": "tiny", "depth": 1}, "train": {"steps": 1, "trackers": []}}
    assert mmldlm.train(settings, store=store, run=tmp_path / "run").step == 1


def test_texts_in_the_place_of_a_store_are_one_clear_line(recipe):
    with pytest.raises(mmldlm.UserError, match=r"store: is a list; give the folder of a pair store"):
        mmldlm.train(recipe, store=["a text"])


def test_progress_is_called_and_nothing_is_printed(recipe, tmp_path, capsys):
    steps = []
    mmldlm.train(recipe, run=tmp_path / "run", overrides=QUICK, progress=lambda *done: steps.append(done))
    assert steps[0] == (0, 4)
    assert steps[-1] == (4, 4)
    assert capsys.readouterr() == ("", "")
    assert not [h for h in logging.getLogger("mmldlm").handlers if isinstance(h, logging.FileHandler)]


def test_a_keyboard_interrupt_leaves_a_checkpoint_and_the_same_call_resumes(recipe, tmp_path, trained):
    slow = QUICK | {"train.checkpoint_every": 100}
    with pytest.raises(Interrupted, match="stopped after step 3, checkpoint saved"):
        mmldlm.train(recipe, run=tmp_path / "run", overrides=slow, progress=stop_at(3))
    stopped = read_run(tmp_path / "run")
    assert (stopped.state, stopped.step) == ("stopped", 3)
    again = mmldlm.train(recipe, run=tmp_path / "run", overrides=slow)
    assert again.finished
    assert again.metrics == trained.metrics


def test_it_trains_in_another_thread_and_leaves_signals_alone(recipe, tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    seen = []

    def work():
        run = mmldlm.train(
            recipe, run=tmp_path / "run", overrides=QUICK, progress=lambda *_: seen.append(handlers())
        )
        seen.append(run.finished)

    def handlers():
        return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen[-1] is True
    assert all(each == before for each in seen[:-1])


def test_a_run_folder_is_whole_from_its_first_checkpoint_without_its_store(tmp_path):
    store = write_store(tmp_path / "store", num_train=60)
    recipe = write_recipe(tmp_path, store.path)
    looks = []

    def look(done, total):
        if done == 3:
            looks.append(load_model(tmp_path / "run", CPU))  # while it trains

    overrides = QUICK | {"train.checkpoint_every": 1}
    with pytest.raises(Interrupted):
        mmldlm.train(
            recipe,
            run=tmp_path / "run",
            overrides=overrides,
            progress=lambda done, total: look(done, total) or stop_at(3)(done, total),
        )
    assert looks[0].step in (1, 2)
    shutil.rmtree(store.path)
    assert not (tmp_path / "run" / "export").exists()
    model = load_model(tmp_path / "run", CPU)
    assert model.step == 3
    assert model.fingerprint == store.fingerprint
    assert (model.normalizer.mean == store.normalizer.mean).all()
    assert model.encoder == store.manifest.encoder
    target, step = export_run(tmp_path / "run")
    assert step == 3
    assert same(weights_of(load_model(target, CPU)), weights_of(model))


def test_the_tokenizer_lies_in_the_folder(recipe, trained, tmp_path):
    from mmldlm.checkpoint.export import read_description, write_description
    from mmldlm.data.store import PairStore
    from mmldlm.run_folder import RunFolder

    class WithTokenizer(PairStore):
        def tokenizer_path(self):
            return tmp_path / "tokenizer"

    store = PairStore.open(
        json.loads((trained.path / "export" / "config.json").read_text())["config"]["data"]["store"]
    )
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    run = RunFolder(tmp_path / "run")
    run.create()
    for _ in range(2):
        write_description(run, WithTokenizer(store.path, store.manifest))
    data, folder = read_description(run)
    assert folder == run.path / "tokenizer"
    assert (folder / "tokenizer.json").read_text() == "{}"
    assert data["content"] == store.content


def test_the_newest_of_checkpoint_and_export_is_loaded_and_damage_is_passed_over(
    recipe, trained, tmp_path, caplog
):
    folder = copy_of(trained, tmp_path)
    final = weights_of(load_model(folder, CPU))
    shutil.rmtree(folder / "export")
    assert same(
        weights_of(load_model(folder, CPU)), final
    )  # the checkpoint of the last step has the same average
    newest = published(folder / "checkpoints")[-1]
    damaged = bytearray((newest / "ema.safetensors").read_bytes())
    damaged[-1] ^= 1
    (newest / "ema.safetensors").write_bytes(damaged)
    with caplog.at_level(logging.WARNING, "mmldlm"):
        assert load_model(folder, CPU).step == 2
    assert "ema.safetensors: differs from its checksum" in caplog.text
    raw = read_weights(folder, averaged=False)
    assert not same(raw.weights, read_weights(folder).weights)


def test_a_run_without_its_description_uses_its_export_or_names_the_file(recipe, trained, tmp_path):
    folder = copy_of(trained, tmp_path)
    (folder / "data.json").unlink()
    published(folder / "checkpoints")  # newest is as old as the export: the export serves
    assert load_model(folder, CPU).step == 4
    shutil.rmtree(folder / "export")
    with pytest.raises(mmldlm.UserError, match=r"data.json: is missing; restore it from a backup"):
        read_weights(folder)


def test_what_is_no_model_is_one_clear_line(tmp_path, monkeypatch, trained):
    with pytest.raises(mmldlm.UserError, match="neither a run nor an export"):
        load_model(tmp_path, CPU)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained.path, tmp_path / "saved" / "mine", symlinks=True)
    assert load_model("mine", CPU).step == 4
    with pytest.raises(mmldlm.UserError, match=r"did you mean saved/mine\?"):
        load_model("saved/mien", CPU)
    with pytest.raises(mmldlm.UserError, match="no such folder of runs"):
        mmldlm.list_runs("nowhere")


def test_a_warm_start_begins_with_the_average_and_a_fresh_optimizer(recipe, trained, tmp_path):
    overrides = QUICK | {"train.steps": 1, "optim.lr": 1e-12, "train.valid_every": 0}
    run = mmldlm.train(recipe, run=tmp_path / "run", overrides=overrides, init=trained)
    begun, ended = weights_of(load_model(trained, CPU)), weights_of(load_model(run, CPU))
    assert all(torch.allclose(begun[name], ended[name], atol=1e-9) for name in begun)
    other = mmldlm.train(recipe, run=tmp_path / "other", overrides=overrides)
    assert not torch.allclose(
        weights_of(load_model(other, CPU))["token_head.weight"], ended["token_head.weight"]
    )
    assert f"starting from the weights of {trained.path}, step 4" in (run.path / "train.log").read_text()


def test_a_warm_start_that_does_not_fit_lists_the_differences(recipe, trained, tmp_path):
    store = write_store(tmp_path / "store", vocab_size=50, num_channels=4).path
    other = QUICK | {"model.depth": 1, "model.width": 64}
    with pytest.raises(mmldlm.UserError) as caught:
        mmldlm.train(recipe, store=store, run=tmp_path / "run", init=trained, overrides=other)
    sizes = ("model.depth: 2 -> 1", "model.width: 32 -> 64", "vocab_size: 97 -> 50", "num_channels: 8 -> 4")
    for part in ("train.init=", *sizes):
        assert part in str(caught.value)


def test_a_warm_start_from_nothing_names_the_setting(recipe, tmp_path):
    with pytest.raises(mmldlm.UserError, match=r"train\.init=nowhere: .*no such run"):
        mmldlm.train(recipe, run=tmp_path / "run", init="nowhere", overrides=QUICK)
    with pytest.raises(mmldlm.UserError, match=r"builtin:nowhere: no package mmldlm_nowhere is installed"):
        mmldlm.train(recipe, run=tmp_path / "run", init="builtin:nowhere", overrides=QUICK)


def test_a_warm_start_takes_other_lengths(recipe, trained, tmp_path):
    store = write_store(tmp_path / "store", max_length=30, encoder="another").path
    run = mmldlm.train(
        recipe, store=store, run=tmp_path / "run", init=trained, overrides=QUICK | {"train.steps": 1}
    )
    assert "another encoder" in (run.path / "train.log").read_text()


def test_a_resumed_run_says_that_it_ignores_init(recipe, trained, tmp_path):
    with pytest.raises(Interrupted):
        mmldlm.train(recipe, run=tmp_path / "run", overrides=QUICK, progress=stop_at(2))
    run = mmldlm.train(recipe, run=tmp_path / "run", overrides=QUICK, init=trained)
    log = (run.path / "train.log").read_text()
    assert log.count(f"train.init={trained.path}: ignored, the run resumes from its own checkpoint") == 1
    assert run.metrics == trained.metrics


def test_a_run_that_lost_its_checkpoints_keeps_its_export(recipe, trained, tmp_path):
    folder = copy_of(trained, tmp_path)
    shutil.rmtree(folder / "checkpoints")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    longer = QUICK | {"train.steps": 20}
    for start in (
        lambda: mmldlm.train(recipe, run=folder, overrides=longer),
        lambda: plan_run(make_config(recipe, longer), folder),
    ):
        with pytest.raises(
            mmldlm.UserError, match="holds an export but no checkpoint to continue from"
        ) as caught:
            start()
        assert f"train.init={folder}" in str(caught.value)
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    new = mmldlm.train(recipe, run=tmp_path / "new", init=folder, overrides=QUICK)
    assert new.finished


def test_an_end_that_no_checkpoint_holds_names_a_way_that_works(recipe, tmp_path, monkeypatch):
    write = durable.write_file

    def full(path, chunks):
        if "checkpoints" in path.parts:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, chunks)

    monkeypatch.setattr(durable, "write_file", full)
    with pytest.raises(mmldlm.UserError, match=r"train\.init=\S+ begins another run with them") as caught:
        mmldlm.train(recipe, run=tmp_path / "run", overrides=QUICK)
    assert "the same command again" not in str(caught.value)
    monkeypatch.undo()
    assert mmldlm.train(recipe, run=tmp_path / "new", init=tmp_path / "run", overrides=QUICK).finished


def test_a_run_that_rejects_another_store_can_still_be_loaded(recipe, trained, tmp_path):
    folder = copy_of(trained, tmp_path)
    shutil.rmtree(folder / "export")
    other = write_store(tmp_path / "other", max_length=30, encoder="another").path
    with pytest.raises(mmldlm.UserError, match="was trained on another pair store"):
        mmldlm.train(recipe, store=other, run=folder, overrides=QUICK)
    assert mmldlm.load(folder).step == trained.step


def test_states_of_runs(trained, tmp_path):
    folder = copy_of(trained, tmp_path)
    beat = json.loads((folder / "heartbeat.json").read_text())
    assert read_run(folder).state == "finished"
    events = (folder / "events.jsonl").read_text()
    (folder / "events.jsonl").write_text(events + '{"event": "resumed"}\n')
    assert read_run(folder).state == "failed"  # no process, and it never said that it ended
    import time

    (folder / "heartbeat.json").write_text(json.dumps(beat | {"phase": "step", "written_at": time.time()}))
    assert read_run(folder).state == "training"
    (folder / "heartbeat.json").write_text(
        json.dumps(beat | {"phase": "step", "written_at": time.time() - 3600})
    )
    assert read_run(folder).state == "failed"
    (folder / "events.jsonl").write_text(events + '{"event": "stopped", "reason": "MemoryError"}\n')
    assert read_run(folder).state == "failed"


def test_a_rejected_warm_start_leaves_no_run_folder_and_a_dry_run_rejects_it_too(recipe, trained, tmp_path):
    words = {"model.depth": 1}
    with pytest.raises(mmldlm.UserError, match=r"train\.init=.*model\.depth: 2 -> 1"):
        mmldlm.train(recipe, run=tmp_path / "run", init=trained, overrides=QUICK | words)
    assert not (tmp_path / "run").exists()
    config = make_config(recipe, QUICK | words)
    config.train.init = str(trained.path)
    with pytest.raises(mmldlm.UserError, match=r"train\.init=.*model\.depth: 2 -> 1"):
        plan_run(config, tmp_path / "run")


def test_a_store_of_unknown_tokens_is_reported_before_and_in_training(recipe, tmp_path, caplog):
    texts = [f"🎉🎉 😀 {number}" for number in range(60)]
    store = mmldlm.prepare(
        texts, tmp_path / "store", encoder=lambda some: [[len(text), 1.0] for text in some]
    )
    settings = QUICK | {"data.store": str(store.path), "train.steps": 2}
    caplog.clear()
    plan_run(make_config(recipe, settings))
    assert caplog.text.count("unknown to the tokenizer builtin:minilm (train 66.7%") == 1
    run = mmldlm.train(recipe, run=tmp_path / "run", overrides=settings)
    assert (run.path / "train.log").read_text().count("unknown to the tokenizer builtin:minilm") == 1


def test_the_log_lists_the_modes_as_they_are_drawn_beside_derived_documents(recipe, tmp_path):
    texts = [f"a coil of rope, the open sea and boat {number}" for number in range(30)]
    store = mmldlm.prepare(
        texts, tmp_path / "store", encoder=lambda some: [[len(text), 1.0] for text in some], derive=2
    )
    run = mmldlm.train(recipe, store=store, run=tmp_path / "run", overrides=QUICK | {"train.steps": 1})
    assert "joint takes whole documents alone, 50 % of them" in (run.path / "train.log").read_text()


def test_a_dry_run_rejects_a_folder_that_cannot_hold_the_run(recipe, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thing").write_text("")
    for path, reason in (("file/run", "is a file"), ("other", "holds something else than a run")):
        with pytest.raises(mmldlm.UserError, match=rf"run folder .*{reason}"):
            plan_run(make_config(recipe, QUICK), tmp_path / path)
    assert sorted(os.listdir(tmp_path)) == ["file", "other"]
