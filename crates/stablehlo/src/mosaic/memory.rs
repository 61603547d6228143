//! Loads and stores of a kernel.

use super::build::{Builder, Value};
use super::kernel::{Kind, Offset, RefId, Space};
use crate::graph::ValueId;
use crate::types::TensorType;
use std::rc::Rc;

/// A memory of a kernel that is being built: scratch, or the current block of an operand.
#[derive(Clone, Debug)]
pub struct Ref {
    pub(super) builder: Builder,
    pub(super) id: RefId,
    pub(super) ty: Rc<TensorType>,
    pub(super) space: Space,
}

impl Ref {
    /// Returns the dtype and shape; for an operand, the shape of its block.
    pub fn ty(&self) -> &TensorType {
        &self.ty
    }

    /// Loads the part of `shape` that begins at `offsets`; an empty shape loads a scalar from SMEM.
    #[track_caller]
    pub fn load(&self, offsets: &[Offset<&Value>], shape: &[usize]) -> Value {
        let ty = TensorType::new(self.ty.dtype, shape);
        let check = self.part(offsets, shape).map(|()| Some(ty.clone()));
        self.builder.emit(Kind::Load(self.id, ids(offsets)), &[], &values(offsets), check, ty)
    }

    /// Loads the whole memory.
    #[track_caller]
    pub fn load_all(&self) -> Value {
        self.load(&vec![Offset::Fixed(0); self.ty.rank()], &self.ty.shape)
    }

    /// Stores `value` in the part that begins at `offsets`.
    #[track_caller]
    pub fn store(&self, offsets: &[Offset<&Value>], value: &Value) {
        let check = if value.dtype() == self.ty.dtype {
            self.part(offsets, value.shape()).map(|()| None)
        } else {
            Err(format!("a value of {} expected, got {}", self.ty.dtype, value.ty()))
        };
        self.builder.emit(Kind::Store(self.id, ids(offsets)), &[value], &values(offsets), check, value.ty().clone());
    }

    /// Stores `value` in the whole memory.
    #[track_caller]
    pub fn store_all(&self, value: &Value) {
        if value.shape() != self.ty.shape {
            self.builder.fail("tpu.vector_store", format!("a value of {} expected, got {}", self.ty, value.ty()));
            return;
        }
        self.store(&vec![Offset::Fixed(0); self.ty.rank()], value);
    }

    /// Checks that a part of `shape` at `offsets` is inside of this memory.
    fn part(&self, offsets: &[Offset<&Value>], shape: &[usize]) -> Result<(), String> {
        if offsets.len() != self.ty.rank() {
            return Err(format!("{} offsets into {}", offsets.len(), self.ty));
        }
        let scalar = shape.is_empty();
        if scalar != (self.space == Space::Smem) {
            return Err(format!("SMEM holds scalars and VMEM vectors; got shape {shape:?} in {:?}", self.space));
        }
        if !scalar && shape.len() != self.ty.rank() {
            return Err(format!("a part of rank {} expected, got shape {shape:?}", self.ty.rank()));
        }
        for (d, offset) in offsets.iter().enumerate() {
            let size = shape.get(d).copied().unwrap_or(1);
            let begin = match offset {
                Offset::Fixed(begin) => *begin,
                Offset::Value(value) if value.is_index() => 0,
                Offset::Value(value) => return Err(format!("an offset should be an i32 scalar, got {}", value.ty())),
            };
            if size == 0 || begin.saturating_add(size) > self.ty.shape[d] {
                return Err(format!("{begin} + {size} entries of dimension {d} of {}", self.ty));
            }
        }
        Ok(())
    }
}

fn ids(offsets: &[Offset<&Value>]) -> Vec<Offset<ValueId>> {
    let id = |offset: &Offset<&Value>| match offset {
        Offset::Fixed(begin) => Offset::Fixed(*begin),
        Offset::Value(value) => Offset::Value(value.id),
    };
    offsets.iter().map(id).collect()
}

fn values<'v>(offsets: &[Offset<&'v Value>]) -> Vec<&'v Value> {
    let value = |offset: &Offset<&'v Value>| match offset {
        Offset::Fixed(_) => None,
        Offset::Value(value) => Some(*value),
    };
    offsets.iter().filter_map(value).collect()
}
