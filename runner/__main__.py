"""The command line: `python -m runner [group=option] [key=value] [-m]`. Compose, validate, run, log.

An error the user can mend is one screen on stderr and status 2; a bug keeps its traceback. A sweep goes on
behind either, and ends by naming the points that failed.
"""

from __future__ import annotations

from runner.cli.termination import ends_without_a_word

with ends_without_a_word():
    import os
    import sys
    import traceback
    from pathlib import Path

    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import CompactHydraException
    from hydra.types import RunMode
    from omegaconf import DictConfig

    from runner.cli.compose import HYDRA_VERSION_BASE, read_config, written_choices
    from runner.cli.launch import checked, parse_args
    from runner.cli.overrides import in_hydras_grammar
    from runner.cli.screen import USER_ERROR_STATUS, show_error, show_interrupt
    from runner.cli.sweep import FailedPointsError
    from runner.earlier_points import EarlierPoints
    from runner.endings import postponed_interrupts, printing
    from runner.engine.errors import UserError

_points = EarlierPoints()  # of the sweep that runs
_shown: list[Exception] = []  # in a multirun a failing job shows its screen, or its traceback, when it fails


@hydra.main(version_base=HYDRA_VERSION_BASE, config_path="pkg://conf", config_name="config")
def app(cfg: DictConfig) -> None:
    """One job."""
    with postponed_interrupts():  # in the middle of numpy's import torch takes one for numpy's failure, and goes on
        from runner.run import execute

    job = HydraConfig.get()
    cwd, output_dir = Path(job.runtime.cwd), Path(job.runtime.output_dir)
    os.chdir(cwd)  # which hydra.job.chdir has left: paths, and where runs are recorded, go by it
    earlier = _points if job.mode is RunMode.MULTIRUN else None
    try:
        execute(read_config(cfg), output_dir, written=written_choices(job), earlier=earlier)
    except UserError as error:
        status = show_error(error)
        if job.mode is RunMode.RUN:
            raise SystemExit(status) from None
        _leave(error)
        raise  # the sweep goes on with its other points and fails at its end
    except Exception as error:
        if job.mode is RunMode.MULTIRUN:
            traceback.print_exc()
            _leave(error)
        raise


def _run_jobs() -> None:
    """By Hydra, which writes what it keeps of a job before it calls ours.

    Raises:
        UserError: there is no room for that; a job's own errors pass.
    """
    try:
        app()
    except OSError as error:
        if any(frame.f_code is app.__wrapped__.__code__ for frame, _ in traceback.walk_tb(error.__traceback__)):
            raise
        raise UserError(
            f"{error.filename or 'the .hydra directory of the run'} cannot be written ({error.strerror}); "
            "make room, or set hydra.run.dir, of a sweep hydra.sweep.dir, to another directory"
        ) from error


def _leave(error: Exception) -> None:
    """The point of a sweep that it ended, and that has been shown."""
    _shown.append(error)
    traceback.clear_frames(error.__traceback__)  # they hold the engine, whose memory the next point needs


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    return printing(lambda: _main(argv))


def _main(argv: list[str] | None) -> int:
    try:
        argv = in_hydras_grammar(sys.argv[1:] if argv is None else argv)
        with checked(parse_args(argv), argv) as sys.argv[1:]:
            _run_jobs()
    except FailedPointsError as error:
        show_error(UserError(str(error)))
        return error.status
    except UserError as error:
        return USER_ERROR_STATUS if error in _shown else show_error(error)
    except CompactHydraException as error:
        return show_error(UserError(str(error)))
    except KeyboardInterrupt:
        return show_interrupt()
    finally:
        _points.forget()
    return 0


if __name__ == "__main__":
    sys.exit(main())
