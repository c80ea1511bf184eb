"""A run of several processes that does nothing but say which they are: `python -m ranks FOLDER`."""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    world = f"{os.environ['LOCAL_RANK']} {os.environ['LOCAL_WORLD_SIZE']} of {os.environ['WORLD_SIZE']}"
    (Path(sys.argv[1]) / os.environ["RANK"]).write_text(world)
