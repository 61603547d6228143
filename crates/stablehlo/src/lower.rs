//! Lowers operations that only this crate has (scans, custom derivatives, names) to operations that
//! compilers accept.

use crate::graph::*;
use crate::sharding::Sharding;
use crate::types::{Dtype, TensorType};
use std::borrow::Cow;
use std::collections::BTreeMap;

impl Module {
    /// Returns the module with [`Function::lowered`] as its main.
    pub fn lowered(&self) -> Cow<'_, Self> {
        match self.main.lowered() {
            Cow::Borrowed(_) => Cow::Borrowed(self),
            Cow::Owned(main) => Cow::Owned(Self { main, name: self.name.clone(), ..*self }),
        }
    }
}

impl Function {
    /// Returns the same function in operations of StableHLO and Shardy only. A [`Kind::Scan`] becomes a [`Kind::While`]
    /// whose trip count [`Function::loops`] can determine. The code of a [`Kind::CustomVjp`] is
    /// inlined. [`Kind::Named`] and [`Kind::StopGradient`] are removed. Shardings over a mesh of one device are removed
    /// too, and a [`Kind::Manual`] on one device is inlined. The text of a module is the text of its lowered form.
    pub fn lowered(&self) -> Cow<'_, Self> {
        let shardings = self.arguments.iter().map(|a| &a.sharding).chain(self.results.iter().map(|r| &r.sharding));
        let mut structured = shardings.flatten().any(is_of_one);
        self.visit(|op| structured |= op.kind.is_structure());
        if !structured {
            return Cow::Borrowed(self);
        }
        let mut lowering = Lowering { types: self.types.clone(), names: BTreeMap::new() };
        let mut body = Region { arguments: self.body.arguments.clone(), ..Region::default() };
        lowering.operations(&self.body.operations, &mut body.operations);
        body.results = lowering.renamed(&self.body.results);
        let (mut arguments, mut results) = (self.arguments.clone(), self.results.clone());
        let shardings =
            arguments.iter_mut().map(|a| &mut a.sharding).chain(results.iter_mut().map(|r| &mut r.sharding));
        shardings.for_each(|sharding| drop(sharding.take_if(|s| is_of_one(s))));
        Cow::Owned(Self { arguments, results, body, types: lowering.types })
    }
}

impl Kind {
    /// Returns `true` if [`Function::lowered`] replaces the operation.
    pub fn is_structure(&self) -> bool {
        match self {
            Self::Scan(_) | Self::CustomVjp { .. } | Self::Named(_) | Self::StopGradient => true,
            Self::Manual(manual) => manual.mesh().devices() == 1,
            Self::Constrain(sharding) => is_of_one(sharding),
            _ => false,
        }
    }
}

fn is_of_one(sharding: &Sharding) -> bool {
    sharding.mesh().devices() == 1
}

struct Lowering {
    types: Vec<TensorType>,
    /// Maps replaced values to their replacements.
    names: BTreeMap<ValueId, ValueId>,
}

impl Lowering {
    fn define(&mut self, ty: TensorType) -> ValueId {
        self.types.push(ty);
        ValueId(self.types.len() - 1)
    }

    fn renamed(&self, ids: &[ValueId]) -> Vec<ValueId> {
        ids.iter().map(|id| self.names.get(id).copied().unwrap_or(*id)).collect()
    }

    fn rename(&mut self, from: &[ValueId], to: &[ValueId]) {
        self.names.extend(from.iter().copied().zip(to.iter().copied()));
    }

    fn operations(&mut self, operations: &[Operation], out: &mut Vec<Operation>) {
        for operation in operations {
            let operands = self.renamed(&operation.operands);
            match &operation.kind {
                Kind::Scan(scan) => self.scan(scan, operation, &operands, out),
                kind @ (Kind::CustomVjp { .. } | Kind::Manual(_)) if kind.is_structure() => {
                    // Results of the code beyond the operation's are residuals, which nothing reads.
                    let code = &operation.regions[0];
                    self.rename(&code.arguments, &operands);
                    self.operations(&code.operations, out);
                    let results = self.renamed(&code.results);
                    self.rename(&operation.results, &results);
                }
                // These return their operand.
                kind if kind.is_structure() => self.rename(&operation.results, &operands),
                kind => {
                    let regions = operation.regions.iter().map(|region| self.region(region)).collect();
                    let results = operation.results.clone();
                    out.push(Operation { kind: kind.clone(), operands, results, regions });
                }
            }
        }
    }

    fn region(&mut self, region: &Region) -> Region {
        let mut operations = vec![];
        self.operations(&region.operations, &mut operations);
        Region { arguments: region.arguments.clone(), operations, results: self.renamed(&region.results) }
    }

    /// Adds an operation with one result.
    fn add(&mut self, out: &mut Vec<Operation>, kind: Kind, operands: Vec<ValueId>, ty: TensorType) -> ValueId {
        let result = self.define(ty);
        out.push(Operation { kind, operands, results: vec![result], regions: vec![] });
        result
    }

    /// Adds a constant i32 scalar.
    fn index(&mut self, out: &mut Vec<Operation>, value: usize) -> ValueId {
        let kind = Kind::Constant(Literal::Splat(Number::Int(value as i64)));
        self.add(out, kind, vec![], TensorType::scalar(Dtype::I32))
    }

    fn scan(&mut self, scan: &Scan, operation: &Operation, operands: &[ValueId], out: &mut Vec<Operation>) {
        let code = &operation.regions[0];
        let (carry, rest) = operands.split_at(scan.carry);
        let (xs, constants) = rest.split_at(scan.xs);
        let (carried, rest) = code.arguments.split_at(scan.carry);
        let (slices, inner) = rest.split_at(scan.xs);
        self.rename(inner, constants);

        let begin = self.index(out, 0);
        let mut initial = vec![begin];
        initial.extend(carry);
        let counter = self.define(TensorType::scalar(Dtype::I32));
        let mut bound = vec![counter];
        bound.extend(carried);
        let mut stacks = vec![];
        for id in &operation.results[scan.carry..] {
            let ty = self.types[id.0].clone();
            let zero = Number::zero(ty.dtype);
            initial.push(self.add(out, Kind::Constant(Literal::Splat(zero)), vec![], ty.clone()));
            stacks.push(self.define(ty));
        }
        bound.extend(&stacks);

        let mut test = vec![];
        let end = self.index(&mut test, scan.trips);
        let more = Kind::Compare(Comparison::Lt);
        let more = self.add(&mut test, more, vec![counter, end], TensorType::scalar(Dtype::Pred));
        let condition = Region { arguments: bound.clone(), operations: test, results: vec![more] };

        let mut turn = vec![];
        let scalar = TensorType::scalar(Dtype::I32);
        let zero = self.index(&mut turn, 0);
        let position = if scan.reverse {
            let last = self.index(&mut turn, scan.trips - 1);
            self.add(&mut turn, Kind::Binary(Binary::Subtract), vec![last, counter], scalar.clone())
        } else {
            counter
        };
        let starts = |rank: usize| (0..rank).map(|d| if d == 0 { position } else { zero }).collect::<Vec<_>>();
        for (stack, slice) in xs.iter().zip(slices) {
            let mut ty = self.types[stack.0].clone();
            ty.shape[0] = 1;
            let mut read = vec![*stack];
            read.extend(starts(ty.rank()));
            let part = self.add(&mut turn, Kind::DynamicSlice { sizes: ty.shape.clone() }, read, ty);
            turn.push(Operation { kind: Kind::Reshape, operands: vec![part], results: vec![*slice], regions: vec![] });
        }
        self.operations(&code.operations, &mut turn);
        let results = self.renamed(&code.results);
        let (next, parts) = results.split_at(scan.carry);
        let one = self.index(&mut turn, 1);
        let mut returned = vec![self.add(&mut turn, Kind::Binary(Binary::Add), vec![counter, one], scalar)];
        returned.extend(next);
        for (stack, part) in stacks.iter().zip(parts) {
            let ty = self.types[stack.0].clone();
            let mut row = ty.clone();
            row.shape[0] = 1;
            let row = self.add(&mut turn, Kind::Reshape, vec![*part], row);
            let mut written = vec![*stack, row];
            written.extend(starts(ty.rank()));
            returned.push(self.add(&mut turn, Kind::DynamicUpdateSlice, written, ty));
        }
        let body = Region { arguments: bound, operations: turn, results: returned };

        let count = self.define(TensorType::scalar(Dtype::I32));
        let mut results = vec![count];
        results.extend(&operation.results);
        let regions = vec![condition, body];
        out.push(Operation { kind: Kind::While, operands: initial, results, regions });
    }
}
