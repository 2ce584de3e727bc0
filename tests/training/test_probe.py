"""The denoiser under the probe: no host waits, no odd types, no parameter without gradient but the declared ones."""

import pytest
from traindoctor.probe import load_target, probe

from mmldlm.config import MODES


@pytest.mark.parametrize("mode", MODES)
def test_probe_of_the_denoiser_reports_no_problem(mode: str) -> None:
    module, loss, unused = load_target(f"mmldlm.training.probe:{mode}")
    report = probe(mode, module, loss, graph_breaks=False, unused=unused)
    assert report.problems == 0
    assert not report.zero_gradient
    assert bool(report.unused) == (mode != "joint")


def test_probe_reports_a_wrong_declaration() -> None:
    module, loss, unused = load_target("mmldlm.training.probe:l2t")
    missing, wrong = "latent_final.weight", "text_final.weight"
    report = probe("l2t", module, loss, graph_breaks=False, unused=(unused - {missing}) | {wrong})
    assert report.without_gradient == [missing]
    assert report.wrongly_declared == [wrong]
