"""Starts the ranks of an elastic run on this machine, and restarts lost ones.

The launcher holds torchft's lighthouse. Rank 0 writes to this console and gives the exit code; others write to files.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic, sleep
from types import FrameType
from typing import Any, final

from evenstep.contrib.elastic.lighthouse import SILENT_S, coordination
from evenstep.parallel.rank_info import ADDRESS, ATTEMPT, COUNT, NUMBER
from evenstep.process import EXIT_ERROR, FINAL, REQUEUE, command, heeded

_LOOK_EVERY_S = 0.1
_LEAVE_S = 5.0  # for the others, when rank 0 has ended


def launch_elastic(ranks: int, arguments: list[str], *, max_restarts: int = 0, timeout_s: float = 60.0) -> int:
    """Run `evenstep` with `arguments` as `ranks` processes, any of which may be lost.

    Args:
        max_restarts: restarts of lost processes, in all.
        timeout_s: longest wait for a process that is alive and makes no progress.
    """
    lighthouse: Any = coordination().LighthouseServer(
        bind="[::]:0",
        min_replicas=1,
        join_timeout_ms=int(1000 * timeout_s),
        quorum_tick_ms=20,
        heartbeat_timeout_ms=int(1000 * SILENT_S),
    )
    # by this name, since a machine's own name need not lead back to it
    address = f"http://localhost:{lighthouse.address().rpartition(':')[2]}"
    logs = Path(tempfile.mkdtemp(prefix="evenstep-ranks-"))
    print(f"ranks       {ranks} on this machine; logs of all but the first in {logs}", flush=True)
    started = _Ranks(ranks, arguments, address, logs)
    before = {number: signal.signal(number, started.forward) for number in heeded((*REQUEUE, signal.SIGINT))}
    try:
        return started.run(max_restarts)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        started.kill()
        lighthouse.shutdown()


@final
class _Ranks:
    def __init__(self, ranks: int, arguments: list[str], lighthouse: str, logs: Path) -> None:
        self._command = [*command(), *arguments]
        self._environ = os.environ | {ADDRESS: lighthouse, COUNT: str(ranks)}
        self._logs = logs
        self._was_signalled = False
        self._processes = {number: self._start(number, attempt=0) for number in range(ranks)}

    def run(self, restarts_left: int) -> int:
        attempts = dict.fromkeys(self._processes, 0)
        over: set[int] = set()
        while True:
            for number in self._processes.keys() - over:
                code = self._processes[number].poll()
                if code is None:
                    continue
                if code in FINAL or self._was_signalled or not restarts_left:
                    over.add(number)
                    self._report(number, code)
                    continue
                restarts_left -= 1
                attempts[number] += 1
                print(f"restart     rank {number}, {restarts_left} more", flush=True)
                self._processes[number] = self._start(number, attempt=attempts[number])
            if 0 in over and (self._processes[0].returncode in FINAL or len(over) == len(self._processes)):
                return self._exit_code()
            sleep(_LOOK_EVERY_S)

    def _start(self, number: int, *, attempt: int) -> subprocess.Popen[bytes]:
        environ = self._environ | {NUMBER: str(number), ATTEMPT: str(attempt)}
        if number == 0:
            return subprocess.Popen(self._command, env=environ)
        with (self._logs / f"rank-{number}.log").open("ab") as log:
            return subprocess.Popen(self._command, env=environ, stdout=log, stderr=subprocess.STDOUT)

    def _report(self, number: int, code: int) -> None:
        if code in FINAL or (number == 0 and code >= 0):  # rank 0 has written its error to this console
            return
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        where = f"its log is {self._logs / f'rank-{number}.log'}" if number else "it keeps the run folder"
        print(f"evenstep: rank {number} is lost ({how}); {where}.", file=sys.stderr)

    def _exit_code(self) -> int:
        """Exit code of rank 0, after the others have had time to leave."""
        until = monotonic() + _LEAVE_S
        while monotonic() < until and any(one.poll() is None for one in self._processes.values()):
            sleep(_LOOK_EVERY_S)
        code = self._processes[0].returncode
        return code if code >= 0 else EXIT_ERROR

    def forward(self, number: int, _frame: FrameType | None) -> None:
        self._was_signalled = True
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(number)

    def kill(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()
