"""Write what is shipped: annie_quant/assets/tiny-annie, its variants as small differences from it, its MTP head, and tiny-moe.

    python training/tiny_annie/ship.py --base base.pt --manners manners.pt --overlays thin.pt more.pt --robust robust.pt
    python training/tiny_annie/ship.py --head mtp.safetensors --mixture mixture.pt

The files are those that sweep.py, mtp.py and mixture.py write. tiny-annie is the manners with the thin overlay of --seed; the
variants are the base, the other thin overlays, and the robust overlay on the base. A difference is stored as two float16 factors
per linear (a [rank, inputs], b [outputs, rank]); tests/helpers/tiny_variants.py adds it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from config import mixture_configuration, write_folder
from forward import Mixture, Weights
from merge import merged, only
from mixture import experts
from safetensors.torch import save

from annie_quant.core.files import ASSETS, replacing

THIN = "attention-r1-s1400-lr0.003-enough1-seed{}"
VARIANTS, VOCABULARY = ASSETS / "tiny-annie-variants", Path(__file__).parent / "vocabulary"


def difference(start: Weights, target: Weights, rank: int) -> tuple[Weights, float]:
    """Return the factors of the best difference of a rank, and the share of the difference (L2) that they leave out."""
    factors: Weights = {}
    left, whole = 0.0, 0.0
    for key, weight in target.items():
        change = weight.float() - start[key].float()
        if not change.any():
            continue
        if change.dim() != 2 or not key.startswith("model.layers."):
            raise SystemExit(f"{key} differs, and an overlay changes the layers' linears alone")
        u, s, v = torch.linalg.svd(change, full_matrices=False)
        name, root = key.removesuffix(".weight"), s[:rank].sqrt()
        factors[f"{name}.a"] = (root[:, None] * v[:rank]).half().contiguous()
        factors[f"{name}.b"] = (u[:, :rank] * root).half().contiguous()
        left += float((s[rank:] ** 2).sum())
        whole += float((s**2).sum())
    return factors, (left / whole) ** 0.5 if whole else 0.0


def ship_dense(options: argparse.Namespace) -> None:
    """Write tiny-annie and its variants."""
    base, manners = (torch.load(p, weights_only=True) for p in (options.base, options.manners))
    thin = {
        name: factors
        for p in options.overlays
        for name, factors in torch.load(p, weights_only=True).items()
    }
    robust = torch.load(options.robust, weights_only=True)
    shipped = merged(manners, only(thin, THIN.format(options.seed)))
    # A rank per variant: that of the overlays between it and the shipped model, which are 1, 1 and 8.
    variants = {"base": (base, 9), "robust": (merged(base, only(robust, "all-r8")), 17)}
    for number, seed in enumerate(options.others, 1):
        variants[f"thin-{number}"] = (merged(manners, only(thin, THIN.format(seed))), 2)
    write_folder(shipped, ASSETS / "tiny-annie", VOCABULARY)
    for name, (weights, rank) in variants.items():
        factors, left = difference(shipped, weights, rank)
        stored = save(factors, metadata={"format": "pt", "of": "tiny-annie"})
        write(VARIANTS / f"{name}.safetensors", stored)
        print(f"{name}: {len(stored):,} bytes, {left:.2%} of the difference left out")


def write(path: Path, stored: bytes) -> None:
    with replacing(path) as file:
        file.write(stored)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", type=Path)
    parser.add_argument("--manners", type=Path)
    parser.add_argument(
        "--overlays", type=Path, nargs="*", help="thin overlays on --manners, in one file or more"
    )
    parser.add_argument("--robust", type=Path, help="an overlay of rank 8 on --base")
    parser.add_argument(
        "--seed", type=int, default=2, help="the thin overlay that is shipped merged"
    )
    parser.add_argument(
        "--others", type=int, nargs="*", default=[8, 7], help="the thin overlays that are variants"
    )
    parser.add_argument("--head", type=Path, help="the MTP head of tiny-annie")
    parser.add_argument("--mixture", type=Path, help="tiny-moe")
    options = parser.parse_args()
    dense = [options.base, options.manners, options.overlays, options.robust]
    if any(dense) and not all(dense):
        parser.error("--base, --manners, --overlays and --robust go together")
    if not (all(dense) or options.head or options.mixture):
        parser.error("nothing to write: --base and its three files, --head or --mixture is needed")
    if all(dense):
        ship_dense(options)
    if options.head:
        write(VARIANTS / "mtp.safetensors", options.head.read_bytes())
    if options.mixture:
        weights = experts(Mixture(), torch.load(options.mixture, weights_only=True))
        write_folder(weights, ASSETS / "tiny-moe", VOCABULARY, mixture_configuration())


if __name__ == "__main__":
    main()
