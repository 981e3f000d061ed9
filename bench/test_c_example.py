"""Test that the C example is compared with llama2.c's attention, and that both compute the same logits."""

import bench_c_example
import numpy as np


def test_a_step_of_the_c_example(capsys):
    bench_c_example.main(["--threads=1", "--dtype=f16", "--seconds=0"])
    lines = capsys.readouterr().out.splitlines()
    assert sum("speedup over llama2.c" in line for line in lines) == 4


def test_both_attentions_agree():
    runner = bench_c_example.Runner(1, "f32")
    runner.feed(b"To be, or not to be")
    logits = {whose: runner.logits(whose, ord(",")) for whose in (bench_c_example.KVCACHE, *bench_c_example.OTHERS)}
    runner.close()
    for found in logits.values():
        np.testing.assert_allclose(found, logits[bench_c_example.PLAIN], atol=1e-3)
