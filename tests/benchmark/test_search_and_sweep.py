"""The search finds what a scan would find, and a sweep tells growth; processes are functions here."""

import pytest

from mmldlm.benchmark import search
from mmldlm.benchmark.arms import Arm
from mmldlm.benchmark.measuring import Failure
from mmldlm.benchmark.report import search_table, sweep_table
from mmldlm.benchmark.search import KEY, largest_multiple, parse_sweep, sweep, sweep_arms
from mmldlm.errors import UserError
from tests.benchmark.measurements import measurement, pretend


@pytest.mark.parametrize("most", [1, 7, 64, 1000])
def test_the_largest_multiple_is_found_in_few_tries(most):
    for limit in range(most + 5):
        tries: list[int] = []
        found = largest_multiple(lambda count: tries.append(count) or count <= limit, most)  # noqa: B023
        truth = min(limit, most)
        assert found <= truth
        assert truth - found <= truth // 16
        assert max(tries) <= most
        assert len(tries) == len(set(tries)) <= 16


def tokens_of(job) -> int:
    return int(next(word for word in reversed(job.settings) if word.startswith(KEY)).partition("=")[2])


def test_the_search_reports_the_largest_and_the_fastest(monkeypatch, tmp_path):
    def answer(job):
        tokens = tokens_of(job)
        if tokens > 21_000:
            return Failure("memory", "out of memory")
        return measurement([tokens / (1 + (tokens / 6000) ** 2)] * 2, gib=tokens / 1000)

    found = search.find_batch(pretend(monkeypatch, tmp_path, answer), Arm("as it is"), 1000)
    assert found.largest.tokens == 21_000
    assert found.fastest.tokens == 8000, "of the sizes tried, the one nearest to the peak at 6000"
    assert [one.tokens for one in found.tries] == sorted(one.tokens for one in found.tries)
    rows = {row[0]: row for row in search_table(found).rows}
    assert rows["21,000"][-1] == "largest that fits"
    assert rows["8,000"][-1] == "fastest"
    assert rows["32,000"][-1] == "out of memory"


def test_the_search_stops_at_a_failure_that_is_no_lack_of_memory(monkeypatch, tmp_path):
    bench = pretend(monkeypatch, tmp_path, lambda job: Failure("error", "RuntimeError: broken"))
    found = search.find_batch(bench, Arm("as it is"), 64)
    assert (found.stopped_by, found.largest, len(bench.trials)) == ("RuntimeError: broken", None, 1)


def test_a_sweep_tells_the_growth_of_time_memory_and_work(monkeypatch, tmp_path):
    def answer(job):
        depth = int(job.settings[-1].partition("=")[2])
        return measurement([1000 / depth**2], gib=depth, flops=10 * depth)

    arms = sweep_arms("model.depth", ["2", "4", "8"], make=None)
    found = sweep(pretend(monkeypatch, tmp_path, answer), "model.depth", arms)
    assert found.growth("seconds_per_step") == pytest.approx([1, 4, 16])
    assert found.growth("memory") == pytest.approx([1, 2, 4])
    assert found.growth("flops_per_step") == pytest.approx([1, 2, 4])
    assert sweep_table(found).rows[2][-4:] == ["16.00", "4.00", "4.00", ""]


def test_an_interrupted_sweep_keeps_what_it_has(monkeypatch, tmp_path):
    def answer(job):
        if job.settings[-1].endswith("=8"):
            raise KeyboardInterrupt
        return measurement([10.0])

    arms = sweep_arms("model.depth", ["2", "8"], make=None)
    found = sweep(pretend(monkeypatch, tmp_path, answer), "model.depth", arms)
    assert found.partial
    assert [point.row.failure for point in found.points] == [None, "not measured"]


@pytest.mark.parametrize("text", ["model.depth", "model.depth=4", "model.depth=4,4", "=1,2", "length=8,x"])
def test_a_sweep_that_cannot_be_read_is_refused(text):
    with pytest.raises(UserError, match="--sweep "):
        parse_sweep(text)
