"""What `backtape init` prints for libraries that are installed here alone."""

import pytest
from first_jobs import assert_runs_and_agrees


@pytest.mark.parametrize("kind", ["hf", "lightning"])
def test_the_job_of_a_library_runs_as_it_is_printed_and_agrees(tmp_path, kind):
    assert_runs_and_agrees(kind, tmp_path)
