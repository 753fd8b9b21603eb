"""Blocks whose largest value is a denormal: the step's reciprocal is infinite, and its products have no int8."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from paths import ROOT

from annie_quant import kquant

PROGRAM = r"""
#include "nvfp4/kquant.h"
#include <stdio.h>

int main(void)
{
    static const float tops[] = {0x1p-149f, 0x1p-140f, 0x1p-130f, 0x1p-128f, 0x1p-126f, 1e-30f, 1.f, 3e38f};
    for (size_t t = 0; t < sizeof tops / sizeof *tops; t++)
        for (int sign = -1; sign <= 1; sign += 2)
            for (int type = 0; type < KQ_TYPES; type++) {
                float x[256];
                unsigned char out[512];
                if (KQ_TYPE[type].block != 32)
                    continue;
                for (int i = 0; i < 256; i++)
                    x[i] = i % 5 ? tops[t] * (float)(sign * (i % 7 - 3)) / 4 : 0;
                for (int at = 0; at < 256; at += 32)
                    KQ_TYPE[type].encode(NULL, x + at, NULL, 0, out);
            }
    puts("defined");
    return 0;
}
"""


@pytest.mark.skipif(
    not shutil.which("gcc"), reason="the encoder is compiled here, and gcc is not installed"
)
def test_no_conversion_of_nan_or_infinity(tmp_path: Path) -> None:
    (tmp_path / "main.c").write_text(PROGRAM)
    sources = [
        ROOT / "csrc/nvfp4/kq_encode.c",
        ROOT / "csrc/nvfp4/kq_search.c",
        tmp_path / "main.c",
    ]
    flags = [
        "-std=c11",
        "-O1",
        "-fsanitize=float-cast-overflow",
        "-fno-sanitize-recover=all",
        f"-I{ROOT / 'csrc'}",
    ]
    subprocess.run(
        ["gcc", *flags, *map(str, sources), "-lm", "-o", str(tmp_path / "encode")], check=True
    )
    done = subprocess.run([str(tmp_path / "encode")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "defined\n"), done.stderr


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_0", "Q4_0"])
def test_denormal_blocks_have_the_same_bytes_on_every_processor(kind: str) -> None:
    """An infinite product has no int8, so its code is 0; Q4_0 and Q5_0 add their offset first, which changes nothing."""
    x = np.zeros((1, 32), np.float32)
    x[0, ::2] = np.float32(2.0**-135)
    x[0, 1::4] = np.float32(-(2.0**-135))
    assert not np.frombuffer(kquant.quantize(x, kind).tobytes(), np.uint8)[2:].any()
