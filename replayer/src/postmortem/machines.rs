//! What may compute beside this process, as a user names it; and what a report says where there is
//! no such device.

use std::str::FromStr;

use crate::device::{self, Device};
use crate::report::schema::DeviceReport;

/// A device as typed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AskedDevice {
    /// This process.
    Cpu,
    /// GPUs, by their numbers; none for all of them.
    Cuda(Vec<usize>),
}

impl FromStr for AskedDevice {
    type Err = String;

    fn from_str(text: &str) -> Result<AskedDevice, String> {
        match text.split_once(':').unwrap_or((text, "0")) {
            ("cpu", "0") => Ok(AskedDevice::Cpu),
            ("cuda", "all") => Ok(AskedDevice::Cuda(Vec::new())),
            ("cuda", numbers) => numbered(numbers).map(AskedDevice::Cuda),
            _ => Err(()),
        }
        .map_err(|()| {
            "it is cpu, cuda, cuda:N, N the number of a GPU, cuda:N,M,... each named once, or \
             cuda:all"
                .into()
        })
    }
}

/// Numbers between commas, none of them twice.
fn numbered(text: &str) -> Result<Vec<usize>, ()> {
    let numbers = text.split(',').map(|number| number.parse().map_err(|_| ()));
    let numbers: Vec<usize> = numbers.collect::<Result<_, _>>()?;
    let twice = numbers.iter().enumerate().any(|(at, number)| numbers[..at].contains(number));
    if twice { Err(()) } else { Ok(numbers) }
}

/// The device that computes, and what the report says of it; neither where none was asked for.
#[derive(Default)]
pub struct Used {
    /// The device, where it can be used.
    pub device: Option<Box<dyn Device>>,
    /// What the report says: which device it is, or why the CPU computes in its place.
    pub report: Option<DeviceReport>,
}

impl Used {
    /// Opens what was asked for.
    pub fn open(asked: Option<&AskedDevice>) -> Used {
        let Some(AskedDevice::Cuda(ordinals)) = asked else { return Used::default() };
        match device::open(ordinals) {
            Ok(device) => {
                let report = Some(DeviceReport::of(device.description()));
                Used { device: Some(device), report }
            }
            Err(error) => {
                Used { device: None, report: Some(DeviceReport::fallen_back(error.to_string())) }
            }
        }
    }
}

/// The cluster that was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AskedCluster {
    /// Its address; `None` for the one that this host is part of.
    pub address: Option<String>,
    /// Cores of one task.
    pub task_cpus: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_named_by_its_kind_and_numbers() {
        let parsed = |text: &str| text.parse::<AskedDevice>();
        assert_eq!(parsed("cpu"), Ok(AskedDevice::Cpu));
        assert_eq!(parsed("cuda"), Ok(AskedDevice::Cuda(vec![0])));
        assert_eq!(parsed("cuda:3"), Ok(AskedDevice::Cuda(vec![3])));
        assert_eq!(parsed("cuda:1,0,7"), Ok(AskedDevice::Cuda(vec![1, 0, 7])));
        assert_eq!(parsed("cuda:all"), Ok(AskedDevice::Cuda(Vec::new())));
        for wrong in
            ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:1", "cuda:0:1", "cuda:0,", "cuda:1,1"]
        {
            assert!(parsed(wrong).unwrap_err().contains("cuda:N"), "{wrong}");
        }
    }
}
