//! Compiles the protobuf definitions with protox, a compiler written in Rust:
//! a machine without protoc can build backtape.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    const DEFINITION: &str = "backtape/v1/coordinator.proto";
    println!("cargo::rerun-if-changed={DEFINITION}");
    let descriptors = protox::compile([DEFINITION], ["."])?;
    tonic_prost_build::configure()
        // A chunk of a shard file stays a slice of the frame it arrived in.
        .bytes(".")
        .compile_fds(descriptors)?;
    Ok(())
}
