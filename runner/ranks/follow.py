"""What the process of a rank but the first runs: the calls of another process's LLM, each as that one makes it."""

from __future__ import annotations

import logging
import traceback
import warnings
from multiprocessing.connection import Connection

from runner.engine.errors import UserError
from runner.llm import LLM
from runner.ranks.follower import Follower, fail


def follow(connection: Connection) -> int:
    """Until that process makes no more calls; the exit status."""
    logging.disable()  # the first rank says the same
    warnings.simplefilter("ignore")
    try:
        ranks = Follower(connection)
        llm = LLM.from_config(ranks.config, ranks=ranks)
        for call in ranks.calls():
            llm.follow(call)
    except UserError as error:
        fail(connection, str(error))
        return 1
    except Exception:
        fail(connection, f"failed:\n{traceback.format_exc()}")
        return 1
    return 0
