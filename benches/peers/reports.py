"""P10: 1,024 simulated ranks x 8 reports + commit, each report durable before it is answered.

    make bench-reports           # SOAK=path of the soak program; ROUNDS (7 or more)

Beside torch's TCPStore (in memory: nothing of it is durable) and a grpcio server that appends each
report to a log and shares one fdatasync among all that wait. Ours also opens every reported file, hashes
and checks its header, and writes a manifest of all of them at the end, which neither peer does. Sides run
in turns, one round each; medians of the rounds are compared. Peers are called from one process with 64
calls in flight, ours from one process with 256. The page cache holds the files that are reported.
"""

import asyncio
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import grpc

RANKS = int(os.environ.get("RANKS", 1024))
FILES = int(os.environ.get("FILES", 8))
ROUNDS = int(os.environ.get("ROUNDS", 7))
SOAK = os.environ.get("SOAK", "target/release/soak")
#: What a report takes on the wire: a name, a length, a hash.
REPORT = b"r" * 120
IN_FLIGHT = 64


class Ours:
    """The coordinator, through `soak reports --pipe`."""

    def __init__(self):
        command = [SOAK, "reports", "--pipe", "--ranks", str(RANKS), "--files", str(FILES)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def round(self, kind):
        self.process.stdin.write(kind + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline().split()
        if len(line) != 2:
            sys.exit(f"soak reports ended: {line}")
        return float(line[0]), float(line[1])

    def close(self):
        self.process.stdin.close()
        self.process.wait(timeout=60)


def grpcio_server(log, sender):
    """A log that many calls share a sync of, behind grpc.aio."""

    class Log:
        def __init__(self):
            self.file = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
            self.waiting = []
            self.wake = asyncio.Event()

        async def append(self, record):
            done = asyncio.get_running_loop().create_future()
            self.waiting.append((record, done))
            self.wake.set()
            await done

        async def flush(self):
            loop = asyncio.get_running_loop()
            while True:
                await self.wake.wait()
                self.wake.clear()
                batch, self.waiting = self.waiting, []
                await loop.run_in_executor(None, self.sync, b"\n".join(record for record, _ in batch))
                for _, done in batch:
                    done.set_result(None)

        def sync(self, records):
            os.write(self.file, records)
            os.fdatasync(self.file)

    async def serve():
        log = Log()

        async def report(request, context):
            await log.append(request)
            return b""

        handler = grpc.unary_unary_rpc_method_handler(report)
        server = grpc.aio.server()
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("bench.Log", {"Report": handler}),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        sender.send(port)
        await log.flush()

    asyncio.run(serve())


def grpcio_client(port, orders, answers):
    """Calls from a process of its own: `per_call` reports in each."""

    async def work():
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/bench.Log/Report")
            loop = asyncio.get_running_loop()
            while (per_call := await loop.run_in_executor(None, orders.recv)) is not None:
                left = iter(range(RANKS * FILES // per_call))
                payload = REPORT * per_call

                async def worker():
                    for _ in left:
                        await call(payload)

                begin = time.perf_counter()
                await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))
                reported = time.perf_counter()
                await call(b"commit")
                answers.send((reported - begin, time.perf_counter() - reported))

    asyncio.run(work())


class Grpcio:
    def __init__(self, folder):
        context = multiprocessing.get_context("spawn")
        receive, send = context.Pipe(False)
        server = context.Process(target=grpcio_server, args=(f"{folder}/log", send), daemon=True)
        server.start()
        self.answers, answers = context.Pipe(False)
        orders, self.orders = context.Pipe(False)
        client = context.Process(target=grpcio_client, args=(receive.recv(), orders, answers), daemon=True)
        client.start()
        self.processes = [client, server]

    def round(self, per_call):
        self.orders.send(per_call)
        return self.answers.recv()

    def close(self):
        self.orders.send(None)
        for process in self.processes:
            process.terminate()
            process.join()


def store_server(sender, stop):
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=True)
    sender.send(store.port)
    stop.wait()


class Store:
    """torch's TCPStore: 8 clients on 8 threads (its calls release the interpreter's lock)."""

    def __init__(self):
        from torch.distributed import TCPStore

        context = multiprocessing.get_context("spawn")
        receive, send = context.Pipe(False)
        self.stop = context.Event()
        self.server = context.Process(target=store_server, args=(send, self.stop), daemon=True)
        self.server.start()
        port = receive.recv()
        patience = timedelta(seconds=60)
        self.clients = [
            TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=patience)
            for _ in range(8)
        ]
        self.pool = ThreadPoolExecutor(len(self.clients))
        self.lock, self.rounds = threading.Lock(), 0

    def round(self, batched):
        self.rounds += 1

        def ranks(index):
            client = self.clients[index]
            for rank in range(index, RANKS, len(self.clients)):
                keys = [f"{self.rounds}/{rank}/{file}" for file in range(FILES)]
                if batched:
                    client.multi_set(keys, [REPORT] * FILES)
                else:
                    for key in keys:
                        client.set(key, REPORT)
                client.add(f"{self.rounds}/closed", 1)

        begin = time.perf_counter()
        list(self.pool.map(ranks, range(len(self.clients))))
        reported = time.perf_counter()
        if self.clients[0].add(f"{self.rounds}/closed", 0) != RANKS:
            sys.exit("TCPStore lost a rank")
        return reported - begin, time.perf_counter() - reported

    def close(self):
        self.stop.set()
        self.server.join(timeout=10)


def fsync_floor(folder, repeats=200):
    """Seconds of one small append and fdatasync: what no durable answer can go below."""
    file = os.open(f"{folder}/floor", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        os.write(file, REPORT)
        os.fdatasync(file)
        found.append(time.perf_counter() - begin)
    os.close(file)
    return statistics.median(found)


def main():
    folder = tempfile.mkdtemp(prefix="backtape-reports-")
    ours, grpcio, store = Ours(), Grpcio(folder), Store()
    sides = {
        "ours, a rank's reports in one call": lambda: ours.round("batched"),
        "ours, a call for each report": lambda: ours.round("single"),
        "grpcio, a call for each report": lambda: grpcio.round(1),
        f"grpcio, {FILES} reports in one call": lambda: grpcio.round(FILES),
        "TCPStore set (not durable)": lambda: store.round(False),
        f"TCPStore multi_set of {FILES} (not durable)": lambda: store.round(True),
    }
    found = {name: [] for name in sides}
    for number in range(ROUNDS + 1):
        for name, side in sides.items():
            result = side()
            if number:  # the first opens connections and warms everything
                found[name].append(result)
    for side in (ours, grpcio, store):
        side.close()
    median = {name: statistics.median(seconds for seconds, _ in rows) for name, rows in found.items()}
    names = list(sides)
    print(f"P10: {RANKS} ranks x {FILES} reports + commit, {ROUNDS} rounds in turns, "
          f"{os.cpu_count()} cores; page cache warm")  # fmt: skip
    for name in names:
        print(f"  {name:44} {RANKS * FILES / median[name]:9.0f} reports/s")
    batched, single, unary, calls, sets, multi = (median[name] for name in names)
    print(f"  ours over grpcio: {unary / batched:.1f}x with each in its usual way (wanted 5x); "
          f"{unary / single:.1f}x a call for each on both sides; {calls / batched:.1f}x in one call on both")  # fmt: skip
    print(f"  ours over TCPStore: {sets / batched:.2f}x; {multi / batched:.2f}x of multi_set")
    commits = sorted(commit for _, commit in found[names[0]] + found[names[1]])
    worst = commits[min(len(commits) - 1, int(len(commits) * 0.99))]
    print(f"  commit after the last report: median {1e3 * statistics.median(commits):.1f} ms, p99 of "
          f"{len(commits)} {1e3 * worst:.1f} ms (wanted 20)")  # fmt: skip
    floor = 1e3 * fsync_floor(folder)
    print(f"  floor: one append and fdatasync takes {floor:.2f} ms")


if __name__ == "__main__":
    main()
