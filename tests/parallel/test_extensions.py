"""Jobs of both frameworks train without any one of the session's extensions."""

import pytest
from jobs import needs_mxnet, run

from lbbsp_core import read_run
from lbbsp_core.report.html.write import write_report
from lbbsp_core.runtime.extensions.every import EXTENSIONS
from lbbsp_core.runtime.extensions.metrics_file import Metrics
from lbbsp_core.runtime.extensions.record_file import Recording

STEPS = 12


@pytest.mark.campaign
@pytest.mark.parametrize("framework", ["tensorflow", pytest.param("mxnet", marks=needs_mxnet)])
def test_each_extension_can_be_deleted(framework, tmp_path):
    job = run("without_extensions", framework, str(tmp_path), workers=2, framework=framework)
    assert job.status == 0
    learned = job.results(0)
    assert job.results(1) == learned
    assert list(learned) == ["none", *(kind.__name__ for kind in EXTENSIONS)]
    for name, weights in learned.items():
        assert weights == pytest.approx(learned["none"], abs=1e-7)
        assert (tmp_path / name / "run.jsonl").exists() == (name != Recording.__name__)
        assert (tmp_path / f"{name}.prom").exists() == (name != Metrics.__name__)
        if name != Recording.__name__:
            assert len(read_run(tmp_path / name).steps) == STEPS
            write_report(tmp_path / name, tmp_path / f"{name}.html")
