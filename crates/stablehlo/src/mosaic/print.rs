//! Prints a kernel in the form that the TPU compiler reads: generic MLIR, with the operation prefixes of the serialised
//! form.

use super::kernel::*;
use crate::graph::{Binary, Number, Reducer, Unary, ValueId};
use crate::types::{Dtype, TensorType};
use std::fmt::{self, Display, Formatter, Write};

/// The version of the serialised form. Newer compilers also read older versions.
const VERSION: u32 = 15;

impl Display for Kernel {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "\"builtin.module\"() ({{")?;
        self.function(f)?;
        for (i, operand) in self.inputs.iter().chain(&self.outputs).enumerate() {
            self.transform(f, i, &operand.window)?;
        }
        writeln!(f, "}}) {{stable_mosaic.version = {VERSION} : i64}} : () -> ()")
    }
}

impl Kernel {
    fn function(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let refs: Vec<String> = (0..).map_while(|i| Some(memref(&self.memory(RefId(i))?))).collect();
        let arguments = self.body.arguments.iter().map(|id| format!("%{}: i32", id.0));
        let memories = refs.iter().enumerate().map(|(i, ty)| format!("%r{i}: {ty}"));
        writeln!(f, "  \"stable_mosaic.func.func\"() ({{")?;
        writeln!(f, "  ^bb0({}):", list(arguments.chain(memories)))?;
        Printer { kernel: self, helpers: 0 }.block(f, &self.body, 4)?;
        writeln!(f, "    \"stable_mosaic.func.return\"() : () -> ()")?;
        let semantics = self.grid.iter().map(|(_, s)| format!("#tpu.dimension_semantics<{s}>"));
        let types = std::iter::repeat_n("i32".to_string(), self.grid.len()).chain(refs);
        let windows = self.inputs.iter().chain(&self.outputs).enumerate().map(|(i, operand)| {
            let bounds = list(operand.window.block.iter());
            format!("{{transform_indices = @transform_{i}, window_bounds = array<i64: {bounds}>}}")
        });
        writeln!(
            f,
            "  }}) {{dimension_semantics = [{}], function_type = ({}) -> (), iteration_bounds = array<i64: {}>, \
             scalar_prefetch = 0 : i64, scratch_operands = {} : i64, sym_name = {:?}, tpu.core_type = \
             #tpu.core_type<tc>, window_params = [{}]}} : () -> ()",
            list(semantics),
            list(types),
            list(self.grid.iter().map(|(size, _)| size)),
            self.scratch.len(),
            self.name,
            list(windows),
        )
    }

    /// Writes the function from grid indices to block indices.
    fn transform(&self, f: &mut Formatter<'_>, operand: usize, window: &Window) -> fmt::Result {
        let ids: Vec<String> = (0..self.grid.len()).map(|i| format!("%i{i}")).collect();
        writeln!(f, "  \"stable_mosaic.func.func\"() ({{")?;
        writeln!(f, "  ^bb0({}):", list(ids.iter().map(|id| format!("{id}: i32"))))?;
        let mut helpers = 0;
        let mut define = |f: &mut Formatter<'_>, what: String| {
            helpers += 1;
            writeln!(f, "    %c{helpers} = {what}").map(|()| format!("%c{helpers}"))
        };
        let binary = |op: &str, a: &str, b: &str| {
            let flags = "{overflowFlags = #arith.overflow<none>}";
            format!("\"stable_mosaic.arith.{op}\"({a}, {b}) {flags} : (i32, i32) -> i32")
        };
        let mut results = vec![];
        for index in &window.index {
            let mut sum: Option<String> = None;
            for (d, factor) in &index.terms {
                let mut term = ids[*d].clone();
                if *factor != 1 {
                    let factor = define(f, literal(factor, "i32"))?;
                    term = define(f, binary("muli", &term, &factor))?;
                }
                sum = Some(match sum {
                    None => term,
                    Some(sum) => define(f, binary("addi", &sum, &term))?,
                });
            }
            results.push(match sum {
                Some(sum) if index.constant == 0 => sum,
                sum => {
                    let offset = define(f, literal(index.constant, "i32"))?;
                    match sum {
                        None => offset,
                        Some(sum) => define(f, binary("addi", &sum, &offset))?,
                    }
                }
            });
        }
        let (from, to) = (list(vec!["i32"; ids.len()]), list(vec!["i32"; results.len()]));
        writeln!(f, "    \"stable_mosaic.func.return\"({}) : ({to}) -> ()", list(results))?;
        let name = format!("sym_name = \"transform_{operand}\"");
        writeln!(f, "  }}) {{function_type = ({from}) -> ({to}), {name}}} : () -> ()")
    }
}

struct Printer<'k> {
    kernel: &'k Kernel,
    /// The number of helper values, which exist in the text only.
    helpers: usize,
}

impl Printer<'_> {
    fn block(&mut self, f: &mut Formatter<'_>, block: &Block, indent: usize) -> fmt::Result {
        block.operations.iter().try_for_each(|operation| self.operation(f, operation, indent))
    }

    fn ty(&self, id: ValueId) -> &TensorType {
        &self.kernel.types[id.0]
    }

    /// Writes a line that defines a helper value, and returns its name.
    fn helper(&mut self, f: &mut Formatter<'_>, indent: usize, what: &str) -> Result<String, fmt::Error> {
        self.helpers += 1;
        writeln!(f, "{:indent$}%h{} = {what}", "", self.helpers)?;
        Ok(format!("%h{}", self.helpers))
    }

    /// Returns offsets as values of type `index`.
    fn offsets(
        &mut self,
        f: &mut Formatter<'_>,
        offsets: &[Offset<ValueId>],
        indent: usize,
    ) -> Result<String, fmt::Error> {
        let mut names = vec![];
        for offset in offsets {
            names.push(self.helper(
                f,
                indent,
                &match offset {
                    Offset::Fixed(at) => literal(at, "index"),
                    Offset::Value(id) => format!("\"stable_mosaic.arith.index_cast\"(%{}) : (i32) -> index", id.0),
                },
            )?);
        }
        Ok(list(names))
    }

    fn operation(&mut self, f: &mut Formatter<'_>, op: &Operation, indent: usize) -> fmt::Result {
        let mut operands = list(op.operands.iter().map(|id| format!("%{}", id.0)));
        let mut types = list(op.operands.iter().map(|id| vector(self.ty(*id))));
        let mut attributes = String::new();
        let mut name = op.kind.name();
        let to = op.result.map(|id| self.ty(id).clone());
        let from = op.operands.first().map(|id| self.ty(*id).clone());
        let float = from.as_ref().is_some_and(|ty| ty.dtype.is_float());
        let fastmath = "fastmath = #arith.fastmath<none>";
        match &op.kind {
            Kind::Constant(number) => {
                if let Some(ty) = &to {
                    attributes = format!("value = {}", constant(*number, ty));
                }
            }
            Kind::Iota(dimension) => attributes = format!("dimensions = array<i32: {dimension}>"),
            Kind::Load(id, at) | Kind::Store(id, at) => {
                let offsets = self.offsets(f, at, indent)?;
                let memory = self.kernel.memory(*id).ok_or(fmt::Error)?;
                let (comma, indices) = (if operands.is_empty() { "" } else { ", " }, list(vec!["index"; at.len()]));
                write!(operands, "{comma}%r{}, {offsets}", id.0)?;
                write!(types, "{comma}{}, {indices}", memref(&memory))?;
                match (memory.1, &op.kind) {
                    (Space::Smem, Kind::Load(..)) => name = "memref.load",
                    (Space::Smem, _) => name = "memref.store",
                    (Space::Vmem, Kind::Load(..)) => {}
                    (Space::Vmem, _) => {
                        let segments = format!("operandSegmentSizes = array<i32: 1, 1, {}, 0>", at.len());
                        attributes = format!("add = false, {segments}, strides = array<i32>");
                    }
                }
            }
            Kind::Unary(_) | Kind::Exp2 => attributes = fastmath.into(),
            Kind::Binary(binary) => {
                name = binary_names(*binary)[if float { 1 } else { 2 }];
                if float {
                    attributes = fastmath.into();
                } else if matches!(binary, Binary::Add | Binary::Subtract | Binary::Multiply) {
                    attributes = "overflowFlags = #arith.overflow<none>".into();
                }
            }
            Kind::Compare(direction) if float => {
                name = "arith.cmpf";
                // Ordered predicates; the builder refuses `Ne` for floats.
                let predicate = [1, 6, 4, 5, 2, 3][*direction as usize];
                attributes = format!("{fastmath}, predicate = {predicate} : i64");
            }
            Kind::Compare(direction) => {
                name = "arith.cmpi";
                attributes = format!("predicate = {} : i64", *direction as usize);
            }
            Kind::Convert => {
                name = match (from.map(|ty| ty.dtype), to.as_ref().map(|ty| ty.dtype)) {
                    (Some(Dtype::Bf16), _) => "arith.extf",
                    (Some(Dtype::I32), _) => "arith.sitofp",
                    (Some(Dtype::Pred), _) => "arith.extui",
                    (_, Some(Dtype::I32)) => "arith.fptosi",
                    _ => "arith.truncf",
                }
            }
            Kind::Reduce(reducer, dimension) => return self.reduce(f, op, *reducer, *dimension, indent),
            Kind::Transpose => attributes = "permutation = array<i64: 1, 0>".into(),
            Kind::Slice(start) => {
                let sizes = to.as_ref().map(|ty| list(&ty.shape)).unwrap_or_default();
                let strides = list(vec![1; start.len()]);
                attributes = format!("offsets = [{}], sizes = [{sizes}], strides = [{strides}]", list(start));
            }
            Kind::If | Kind::For(_) => return self.control(f, op, indent),
            Kind::Select | Kind::Broadcast | Kind::Reshape => {}
        }
        let result = op.result.map(|id| format!("%{} = ", id.0)).unwrap_or_default();
        let attributes = if attributes.is_empty() { attributes } else { format!(" {{{attributes}}}") };
        let to = to.map_or("()".into(), |ty| vector(&ty));
        writeln!(f, "{:indent$}{result}\"stable_mosaic.{name}\"({operands}){attributes} : ({types}) -> {to}", "")
    }

    /// Mosaic's reduction starts from a vector of identity elements and drops the dimension.
    fn reduce(
        &mut self,
        f: &mut Formatter<'_>,
        op: &Operation,
        reducer: Reducer,
        d: usize,
        indent: usize,
    ) -> fmt::Result {
        let (Some(operand), Some(result)) = (op.operands.first(), op.result) else { return Err(fmt::Error) };
        let (from, to) = (vector(self.ty(*operand)), self.ty(result).clone());
        let mut reduced = to.clone();
        reduced.shape.remove(d);
        let (kind, neutral) = match reducer {
            Reducer::Add => ("add", 0.0),
            _ => ("maximumf", f64::NEG_INFINITY),
        };
        let neutral = constant(Number::Float(neutral), &reduced);
        let (reduced, to) = (vector(&reduced), vector(&to));
        let start = self.helper(
            f,
            indent,
            &format!("\"stable_mosaic.arith.constant\"() {{value = {neutral}}} : () -> {reduced}"),
        )?;
        let reduction = format!(
            "\"stable_mosaic.{}\"(%{}, {start}) {{kind = #vector.kind<{kind}>, reduction_dims = array<i64: {d}>}} : \
             ({from}, {reduced}) -> {reduced}",
            op.kind.name(),
            operand.0
        );
        let flat = self.helper(f, indent, &reduction)?;
        writeln!(f, "{:indent$}%{} = \"stable_mosaic.vector.shape_cast\"({flat}) : ({reduced}) -> {to}", "", result.0)
    }

    fn control(&mut self, f: &mut Formatter<'_>, op: &Operation, indent: usize) -> fmt::Result {
        let end = "\"stable_mosaic.scf.yield\"() : () -> ()";
        let (header, types) = match op.kind {
            Kind::For(trips) => {
                let mut bounds = vec![];
                for value in [0, trips, 1] {
                    bounds.push(self.helper(f, indent, &literal(value, "i32"))?);
                }
                (list(bounds), "i32, i32, i32")
            }
            _ => (list(op.operands.iter().map(|id| format!("%{}", id.0))), "i1"),
        };
        writeln!(f, "{:indent$}\"stable_mosaic.{}\"({header}) ({{", "", op.kind.name())?;
        for block in &op.blocks {
            for id in &block.arguments {
                writeln!(f, "{:indent$}^bb0(%{}: {}):", "", id.0, vector(self.ty(*id)))?;
            }
            self.block(f, block, indent + 2)?;
        }
        writeln!(f, "{:indent$}  {end}", "")?;
        if op.kind == Kind::If {
            writeln!(f, "{:indent$}}}, {{\n{:indent$}  {end}", "", "")?;
        }
        writeln!(f, "{:indent$}}}) : ({types}) -> ()", "")
    }
}

/// Returns an operation that makes a constant scalar.
fn literal(value: impl Display, ty: &str) -> String {
    format!("\"stable_mosaic.arith.constant\"() {{value = {value} : {ty}}} : () -> {ty}")
}

fn list<T: Display>(items: impl IntoIterator<Item = T>) -> String {
    items.into_iter().map(|item| item.to_string()).collect::<Vec<_>>().join(", ")
}

fn shaped(kind: &str, ty: &TensorType, rest: &str) -> String {
    let sizes: String = ty.shape.iter().map(|size| format!("{size}x")).collect();
    format!("{kind}<{sizes}{}{rest}>", ty.dtype)
}

fn memref((ty, space): &(TensorType, Space)) -> String {
    shaped("memref", ty, &format!(", #tpu.memory_space<{space}>"))
}

fn vector(ty: &TensorType) -> String {
    if ty.shape.is_empty() { ty.dtype.to_string() } else { shaped("vector", ty, "") }
}

fn constant(number: Number, ty: &TensorType) -> String {
    let number = match number {
        Number::Bool(value) => value.to_string(),
        Number::Int(value) => value.to_string(),
        Number::Float(value) => float(value, ty.dtype),
    };
    match (ty.shape.is_empty(), ty.dtype) {
        (true, Dtype::Pred) => number,
        (true, dtype) => format!("{number} : {dtype}"),
        (false, _) => format!("dense<{number}> : {}", vector(ty)),
    }
}

/// Prints a decimal number if it is exact, and the bits otherwise.
fn float(value: f64, dtype: Dtype) -> String {
    let bits = match dtype {
        Dtype::Bf16 => format!("0x{:04X}", half::bf16::from_f64(value).to_bits()),
        _ => format!("0x{:08X}", (value as f32).to_bits()),
    };
    let short = format!("{value:?}");
    if value.is_finite() && short.len() <= 8 && !short.contains('e') && dtype == Dtype::F32 { short } else { bits }
}

impl Kind {
    /// Returns the operation's name in Mosaic, without the suffix for the dtype.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Constant(_) => "arith.constant",
            Self::Iota(_) => "tpu.iota",
            Self::Load(..) => "vector.load",
            Self::Store(..) => "tpu.vector_store",
            Self::Unary(Unary::Negate) => "arith.negf",
            Self::Unary(Unary::Abs) => "math.absf",
            Self::Unary(Unary::Exponential) => "math.exp",
            Self::Unary(Unary::Log) => "math.log",
            Self::Unary(other) => other.name(),
            Self::Exp2 => "math.exp2",
            Self::Binary(binary) => binary_names(*binary)[0],
            Self::Compare(_) => "arith.cmp",
            Self::Select => "arith.select",
            Self::Convert => "arith.convert",
            Self::Broadcast => "vector.broadcast",
            Self::Reduce(..) => "vector.multi_reduction",
            Self::Reshape => "vector.shape_cast",
            Self::Transpose => "tpu.transpose",
            Self::Slice(_) => "vector.extract_strided_slice",
            Self::If => "scf.if",
            Self::For(_) => "scf.for",
        }
    }
}

/// Returns the operation's names: without a suffix, for floating-point types, and for other types.
fn binary_names(binary: Binary) -> [&'static str; 3] {
    match binary {
        Binary::Add => ["arith.add", "arith.addf", "arith.addi"],
        Binary::Subtract => ["arith.sub", "arith.subf", "arith.subi"],
        Binary::Multiply => ["arith.mul", "arith.mulf", "arith.muli"],
        Binary::Divide => ["arith.div", "arith.divf", "arith.divsi"],
        Binary::Maximum => ["arith.max", "arith.maximumf", "arith.maxsi"],
        Binary::Minimum => ["arith.min", "arith.minimumf", "arith.minsi"],
        Binary::And => ["arith.and", "arith.andi", "arith.andi"],
        Binary::Or => ["arith.or", "arith.ori", "arith.ori"],
        other => [other.name(); 3],
    }
}
