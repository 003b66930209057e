"""Write tests/exchange/byzfl.json: what ByzFL's rules make of a few vectors, for a test of ours.

    pip install --no-deps byzfl==0.0.11
    python tools/byzfl_golden.py

ByzFL is no dependency, not even of the tests: the package asks for torchvision, of which its
aggregators use nothing. So they are imported without the package's own `__init__`.
"""

import json
import sys
import types
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

PAGE = Path(__file__).resolve().parent.parent / "tests" / "exchange" / "byzfl.json"
CASES = ((5, 4, 1), (8, 3, 2), (11, 7, 3))
"""Vectors, their length, and how many of them lie."""


def aggregators() -> Any:
    """Return ByzFL's module of aggregators."""
    spec = find_spec("byzfl")
    if spec is None or spec.submodule_search_locations is None:
        sys.exit("byzfl is not installed; see the top of this file")
    package = types.ModuleType("byzfl")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["byzfl"] = package
    return import_module("byzfl.aggregators")


def main() -> None:
    """Draw vectors, let ByzFL merge them, and write both down."""
    rules, generator, cases = aggregators(), np.random.default_rng(0), []
    for count, length, liars in CASES:
        vectors = generator.normal(size=(count, length))
        vectors[:liars] = 20 * generator.normal(size=(liars, length))
        clipped = rules.Clipping(c=2.0)(vectors.copy())
        found = {
            "median": rules.Median()(vectors),
            "trimmed-mean": rules.TrMean(f=liars)(vectors),
            "krum": rules.Krum(f=liars)(vectors),
            "geometric-median": rules.GeometricMedian(nu=1e-6, T=1000)(vectors),
            "geometric-median, 3 steps": rules.GeometricMedian(nu=0.1, T=3)(vectors),
            "norm-bound": rules.Average()(clipped),
        }
        merged = {rule: vector.tolist() for rule, vector in found.items()}
        cases.append({"vectors": vectors.tolist(), "attackers": liars, "merged": merged})
    content = {"byzfl": metadata.version("byzfl"), "cases": cases}
    PAGE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
