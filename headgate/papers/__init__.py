"""What papers report, one JSON file each; `paper.py` reads them, `headgate.compare.claims` judges them."""
