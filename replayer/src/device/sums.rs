//! Sums of the backward pass for some rows of q or of k, on the device.

use super::error::DeviceError;
use super::machine::Machine;
use super::room::Room;

/// How many sums there are: of entries, of their squares, of their variances, of what a filter
/// dropped, of confident entries.
pub(super) const SUMS: usize = 5;

/// `[rows, D]` each; what a walk does not ask for has no room.
pub(super) struct Sums<M: Machine> {
    rooms: [Option<Room<M>>; SUMS],
}

impl<M: Machine> Sums<M> {
    /// Goes on from what other rows of the walk left; an empty one is not asked for.
    pub(super) fn put(machine: &M, from: [&[f64]; SUMS]) -> Result<Self, DeviceError> {
        let mut rooms = [(); SUMS].map(|()| None);
        for (room, values) in rooms.iter_mut().zip(from) {
            if !values.is_empty() {
                room.insert(Room::default()).put(machine, values)?;
            }
        }
        Ok(Sums { rooms })
    }

    /// Zeros, of so many values each.
    pub(super) fn zeros(
        machine: &M,
        values: usize,
        asked: [bool; SUMS],
    ) -> Result<Self, DeviceError> {
        let mut rooms = [(); SUMS].map(|()| None);
        for (room, _) in rooms.iter_mut().zip(asked).filter(|(_, asked)| *asked && values > 0) {
            room.insert(Room::default()).of(machine, values)?;
        }
        Ok(Sums { rooms })
    }

    /// Fetches those that there is a place for.
    pub(super) fn get(&self, machine: &M, to: [&mut [f64]; SUMS]) -> Result<(), DeviceError> {
        for (room, values) in self.rooms.iter().zip(to) {
            if let Some(room) = room.as_ref().filter(|_| !values.is_empty()) {
                room.get(machine, values)?;
            }
        }
        Ok(())
    }

    /// Those that are asked for.
    pub(super) fn rooms(&self) -> impl Iterator<Item = &Room<M>> {
        self.rooms.iter().flatten()
    }

    /// Where value number `index` of each lies; `None` for what is not asked for.
    pub(super) fn at(&self, machine: &M, index: usize) -> [Option<u64>; SUMS] {
        self.rooms.each_ref().map(|room| room.as_ref().map(|room| room.at(machine, index)))
    }
}
