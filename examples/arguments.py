"""The options that the examples have in common."""

import argparse

import ranks


def of_job(description):
    """A parser with the options of every job: ranks, model, batch, loss head."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    ranks.add_arguments(parser)
    parser.add_argument("--use-fused-xent-loss", choices=("true", "false"), default="true")
    parser.add_argument("--label-gather", choices=("bf16", "f32"), default="f32")
    parser.add_argument("--num-microbatches", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rows", type=int, default=4, help="rows per rank and microbatch")
    parser.add_argument("--length", type=int, default=256, help="tokens in a row")
    parser.add_argument("--vocab", type=int, default=8300, help="entries learnt from the text")
    parser.add_argument("--padded-vocab", type=int, default=8448)
    parser.add_argument("--tile", type=int, default=1024, help="vocabulary entries in a tile")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    return parser


def parsed(parser, argv):
    """The arguments, once what every job needs of them holds."""
    args = parser.parse_args(argv)
    if args.launch is None and args.coordinator_address is None:
        parser.error("give --launch N, or --rank, --world-size and --coordinator-address")
    if args.padded_vocab < args.vocab:
        parser.error("--padded-vocab must be at least --vocab")
    return args
