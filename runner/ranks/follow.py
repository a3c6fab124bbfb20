"""What the process of a rank but the first runs: the calls of another process's LLMs, each as these make it."""

from __future__ import annotations

import logging
import traceback
import warnings
from multiprocessing.connection import Connection

from runner.engine.errors import UserError
from runner.llm import LLM
from runner.ranks.follower import Follower, fail
from runner.ranks.ranks import Build


def follow(connection: Connection) -> int:
    """Until that process makes no more calls; the exit status."""
    logging.disable()  # the first rank says the same
    warnings.simplefilter("ignore")
    try:
        ranks, llm = Follower(connection), None
        for call in ranks.calls():
            if isinstance(call, Build):
                target_info = llm.engine.target_info if llm is not None and call.shares_target else None
                llm = None  # its memory is the next one's
                llm = LLM.from_config(call.config, target_info, ranks)
            else:
                assert llm is not None, "an engine comes first"
                llm.follow(call)
    except UserError as error:
        fail(connection, str(error))
        return 1
    except Exception:
        fail(connection, f"failed:\n{traceback.format_exc()}")
        return 1
    return 0
