"""Communication hides behind the backward pass: gradients are sent before the last is computed."""

from surfaces import check_surfaces

RESTS = 0.1  # seconds of the backward pass, below the top layer; see the script


def test_gradients_of_the_top_travel_while_those_below_are_computed(clusters, tmp_path):
    job = clusters.run("overlap", str(tmp_path), "1", str(1 << 40), workers=2)
    assert job.status == 0
    results = job.results(0)
    least, usual = results[f"{tmp_path}/1"]
    assert least > 0, "the sums of the top layer have travelled before the clock was read"
    assert usual < RESTS / 2, "and had arrived before"
    assert results[f"{tmp_path}/{1 << 40}"] == [0, 0]
    check_surfaces(tmp_path / "1")  # with hidden communication
