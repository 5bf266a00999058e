"""Writes digits.u8 from the copy of the data that scikit-learn ships.

Usage: python make_digits.py [folder]     (needs scikit-learn; made with 1.9.1)
"""

import pathlib
import sys

import numpy as np
from sklearn.datasets import load_digits


def main() -> None:
    here = pathlib.Path(__file__).parent
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else here
    digits = load_digits()
    rows = np.column_stack([digits.data, digits.target])
    assert rows.shape == (1797, 65)
    assert (rows == rows.astype(np.uint8)).all()
    rows.astype(np.uint8).tofile(folder / "digits.u8")


if __name__ == "__main__":
    main()
