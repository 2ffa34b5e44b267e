"""P5: a client stream of 1 GiB on loopback.

    make bench-stream            # SOAK=path of the soak program; ROUNDS (7 or more), MIB

Ours is the upload of a rank's file to the coordinator (`soak stream`): the messages alone to a coordinator's
transport, plain and with mutual TLS, and to a real coordinator, which hashes every shard as it arrives and
answers when file and journal are durable. Beside grpcio and Arrow Flight, plain, to servers in processes of
their own that count the bytes, and a raw TCP connection, which is the floor. Peers send from memory; ours
reads its file from the page cache. Sides run in turns, one round each.
"""

import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pyarrow
import pyarrow.flight as flight

MIB = int(os.environ.get("MIB", 1024))
ROUNDS = int(os.environ.get("ROUNDS", 7))
SOAK = os.environ.get("SOAK", "target/release/soak")
CHUNK = 1 << 20
BATCH = 16 << 20
WAYS = ("plain", "mtls", "durable", "mtls-durable")
METHOD = "/bench.Upload/Send"


class Ours:
    """`soak stream --pipe`."""

    def __init__(self):
        command = [SOAK, "stream", "--pipe", "--mib", str(MIB)]
        if os.environ.get("DIR"):
            command += ["--dir", os.environ["DIR"]]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def round(self, way):
        self.process.stdin.write(way + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            sys.exit("soak stream ended")
        return float(line)

    def close(self):
        self.process.stdin.close()
        self.process.wait(timeout=60)


def tcp_server(sender):
    listener = socket.create_server(("127.0.0.1", 0))
    sender.send(listener.getsockname()[1])
    buffer = memoryview(bytearray(4 * CHUNK))
    while True:
        connection, _ = listener.accept()
        with connection:
            left = MIB << 20
            while left and (n := connection.recv_into(buffer)):
                left -= n
            connection.sendall(b"y" if not left else b"n")


def grpcio_server(sender):
    def take(chunks, context):
        return str(sum(map(len, chunks))).encode()

    handler = grpc.stream_unary_rpc_method_handler(take)
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Upload", {"Send": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    sender.send(port)
    server.wait_for_termination()


class FlightServer(flight.FlightServerBase):
    def do_put(self, context, descriptor, reader, writer):
        total = 0
        for chunk in reader:
            total += chunk.data.column(0).nbytes
        writer.write(str(total).encode())


def flight_server(sender):
    server = FlightServer("grpc://127.0.0.1:0")
    sender.send(server.port)
    server.serve()


def started(context, target):
    """A server in a process of its own, and its port."""
    receive, send = context.Pipe(False)
    process = context.Process(target=target, args=(send,), daemon=True)
    process.start()
    return process, receive.recv()


class Peers:
    def __init__(self):
        context = multiprocessing.get_context("spawn")
        found = [started(context, target) for target in (tcp_server, grpcio_server, flight_server)]
        self.processes = [process for process, _ in found]
        self.tcp_port, grpcio_port, flight_port = (port for _, port in found)
        self.memory = memoryview(os.urandom(CHUNK) * MIB)
        self.chunks = [bytes(self.memory[at : at + CHUNK]) for at in range(0, len(self.memory), CHUNK)]
        self.send = grpc.insecure_channel(f"127.0.0.1:{grpcio_port}").stream_unary(METHOD)
        self.flight = flight.connect(f"grpc://127.0.0.1:{flight_port}")
        self.schema = pyarrow.schema([("bytes", pyarrow.uint8())])
        whole = pyarrow.py_buffer(self.memory)
        self.batches = []
        for at in range(0, len(self.memory), BATCH):
            part = whole.slice(at, min(BATCH, len(self.memory) - at))
            array = pyarrow.Array.from_buffers(pyarrow.uint8(), part.size, [None, part])
            self.batches.append(pyarrow.RecordBatch.from_arrays([array], schema=self.schema))

    def tcp(self):
        with socket.create_connection(("127.0.0.1", self.tcp_port)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            begin = time.perf_counter()
            connection.sendall(self.memory)
            answer = connection.recv(1)
            took = time.perf_counter() - begin
        assert answer == b"y", "bytes were lost"
        return took

    def grpcio(self):
        begin = time.perf_counter()
        answer = self.send(iter(self.chunks))
        took = time.perf_counter() - begin
        assert int(answer) == len(self.memory), answer
        return took

    def arrow(self):
        begin = time.perf_counter()
        writer, reader = self.flight.do_put(flight.FlightDescriptor.for_path("bench"), self.schema)
        for batch in self.batches:
            writer.write_batch(batch)
        writer.done_writing()
        answer = reader.read()
        took = time.perf_counter() - begin
        writer.close()
        assert int(answer.to_pybytes()) == len(self.memory), answer
        return took

    def close(self):
        for process in self.processes:
            process.terminate()


def durable_floor():
    """Seconds of the same bytes in direct writes of 16 MiB and an fsync: no durable side is faster."""
    import mmap

    memory = mmap.mmap(-1, BATCH)
    memory.write(os.urandom(BATCH))
    with tempfile.TemporaryDirectory(dir=os.environ.get("DIR")) as folder:
        file = os.open(f"{folder}/floor", os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
        begin = time.perf_counter()
        for at in range(0, MIB << 20, BATCH):
            os.pwrite(file, memory, at)
        os.fsync(file)
        took = time.perf_counter() - begin
        os.close(file)
    return took


def main():
    ours, peers = Ours(), Peers()
    sides = {f"ours, {way}": lambda way=way: ours.round(way) for way in WAYS}
    sides |= {"raw TCP": peers.tcp, "grpcio": peers.grpcio, "Arrow Flight": peers.arrow,
              "O_DIRECT writes": durable_floor}  # fmt: skip
    rows = []
    for number in range(ROUNDS + 1):
        names = list(sides)
        turn = number % len(names)
        row = {name: sides[name]() for name in names[turn:] + names[:turn]}
        if number:  # the first opens connections and warms everything
            rows.append(row)
    ours.close()
    peers.close()
    ratio = lambda over, under: statistics.median(row[over] / row[under] for row in rows)
    print(f"P5: {MIB} MiB to another process on loopback, {len(rows)} rounds in turns, {os.cpu_count()} cores; "
          f"what ours sends is in the page cache, what peers send in memory")  # fmt: skip
    for name in sides:
        seconds = statistics.median(row[name] for row in rows)
        print(f"  {name:20} {(MIB << 20) / 1e9 / seconds:6.2f} GB/s")
    for name in (f"ours, {way}" for way in WAYS):
        raw, unary, arrow, disk = (ratio(of, name) for of in ("raw TCP", "grpcio", "Arrow Flight", "O_DIRECT writes"))
        print(f"  {name:20} {raw:.2f} of raw TCP, {unary:.2f}x grpcio, {arrow:.2f}x Flight, {disk:.2f} of the disk")
    print("  targets: plain 0.8 of raw TCP, 1.5x grpcio, 1x Flight; mtls 1 GB/s")


if __name__ == "__main__":
    main()
