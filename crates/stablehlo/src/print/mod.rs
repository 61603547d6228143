//! Prints programs in the form that compilers parse.

mod attributes;
mod literal;
mod region;
mod sharding;

use crate::graph::*;
use crate::sharding::Sharding;
use crate::types::{Dtype, TensorType};
use attributes::{i64_array, quoted, row_major};
use literal::LiteralOf;
use std::fmt::{self, Display, Formatter};

impl Display for Module {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { name, partitions, main } = &*self.lowered();
        write!(f, "module @{name} attributes {{mhlo.num_partitions = {partitions} : i32, ")?;
        writeln!(f, "mhlo.num_replicas = 1 : i32}} {{")?;
        for mesh in main.meshes() {
            writeln!(f, "  sdy.mesh {mesh}")?;
        }
        write!(f, "  func.func public @main(")?;
        for (i, (argument, id)) in main.arguments.iter().zip(&main.body.arguments).enumerate() {
            let alias = argument.alias.map(|result| format!("tf.aliasing_output = {result} : i32"));
            let layout = layout_mode(argument.row_major, main.type_of(*id));
            let attributes = attributes([alias, split(argument.sharding.as_ref()), layout]);
            // The name is printed as a location, which does not affect compilation.
            let name =
                if argument.name.is_empty() { String::new() } else { format!(" loc({})", quoted(&argument.name)) };
            write!(f, "{}\n      {}: {}{attributes}{name}", separator(i), Name(*id), main.type_of(*id))?;
        }
        write!(f, ") -> (")?;
        for (i, (result, id)) in main.results.iter().zip(&main.body.results).enumerate() {
            let name = (!result.name.is_empty()).then(|| format!("jax.result_info = {}", quoted(&result.name)));
            let layout = layout_mode(result.row_major, main.type_of(*id));
            let attributes = attributes([name, split(result.sharding.as_ref()), layout]);
            write!(f, "{}\n      {}{attributes}", separator(i), main.type_of(*id))?;
        }
        writeln!(f, ") {{")?;
        Printer { function: main }.region(f, &main.body, 4, "return")?;
        writeln!(f, "  }}\n}}")
    }
}

fn split(sharding: Option<&Sharding>) -> Option<String> {
    sharding.map(|s| format!("sdy.sharding = #sdy.sharding{s}"))
}

fn layout_mode(row_major: bool, ty: &TensorType) -> Option<String> {
    let order: Vec<String> = (0..ty.rank()).rev().map(|d| d.to_string()).collect();
    row_major.then(|| format!("mhlo.layout_mode = \"{{{}}}\"", order.join(",")))
}

/// Prints the attributes of an argument or a result.
fn attributes<const K: usize>(list: [Option<String>; K]) -> String {
    let list: Vec<String> = list.into_iter().flatten().collect();
    if list.is_empty() { String::new() } else { format!(" {{{}}}", list.join(", ")) }
}

fn separator(index: usize) -> &'static str {
    if index == 0 { "" } else { "," }
}

#[derive(Clone)]
struct Name(ValueId);

impl Display for Name {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "%{}", self.0.0)
    }
}

/// Prints items separated by commas.
struct List<T>(T);

impl<T: Clone + IntoIterator<Item: Display>> Display for List<T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for (i, item) in self.0.clone().into_iter().enumerate() {
            write!(f, "{}{item}", if i == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

fn names(ids: &[ValueId]) -> List<Vec<Name>> {
    List(ids.iter().map(|id| Name(*id)).collect())
}

struct Printer<'a> {
    function: &'a Function,
}

impl Printer<'_> {
    fn type_of(&self, id: ValueId) -> &TensorType {
        self.function.type_of(id)
    }

    fn types(&self, ids: &[ValueId]) -> List<Vec<&TensorType>> {
        List(ids.iter().map(|id| self.type_of(*id)).collect())
    }

    /// Prints the types of an operation's results, in parentheses unless there is one.
    fn result_types(&self, op: &Operation) -> String {
        match &op.results[..] {
            [result] => self.type_of(*result).to_string(),
            results => format!("({})", self.types(results)),
        }
    }

    fn region(&self, f: &mut Formatter<'_>, region: &Region, indent: usize, end: &str) -> fmt::Result {
        for operation in &region.operations {
            write!(f, "{:indent$}", "")?;
            self.operation(f, operation, indent)?;
            writeln!(f)?;
        }
        writeln!(f, "{:indent$}{end} {} : {}", "", names(&region.results), self.types(&region.results))
    }

    fn operation(&self, f: &mut Formatter<'_>, op: &Operation, indent: usize) -> fmt::Result {
        write!(f, "{} = ", names(&op.results))?;
        let operands = names(&op.operands);
        let result = self.type_of(op.results[0]);
        let signature = self.signature(op);
        let name = op.kind.name();
        match &op.kind {
            Kind::Constant(literal) => {
                write!(f, "{name} dense<{}> : {result}", LiteralOf(literal, result))
            }
            Kind::Iota { dimension } => write!(f, "{name} dim = {dimension} : {result}"),
            Kind::Unary(Unary::IsFinite) => write!(f, "{name} {operands} : {signature}"),
            Kind::Unary(_) | Kind::Binary(_) => write!(f, "{name} {operands} : {result}"),
            Kind::Compare(direction) => {
                let kind = region::comparison_type(self.type_of(op.operands[0]).dtype);
                write!(f, "{name} {direction}, {operands}, {kind} : {signature}")
            }
            Kind::Select => {
                write!(f, "{name} {operands} : {}, {result}", self.type_of(op.operands[0]))
            }
            Kind::Clamp | Kind::Convert | Kind::BitcastConvert | Kind::Reshape => {
                write!(f, "{name} {operands} : {signature}")
            }
            Kind::DotGeneral(dimensions, precision) => {
                write!(f, "{name} {operands}")?;
                let DotDimensions { batch, contract } = dimensions;
                if !batch.0.is_empty() {
                    write!(f, ", batching_dims = {:?} x {:?}", batch.0, batch.1)?;
                }
                write!(f, ", contracting_dims = {:?} x {:?}", contract.0, contract.1)?;
                write!(f, ", precision = [{precision}, {precision}] : {signature}")
            }
            Kind::Reduce { reducers, dimensions } => self.reduce(f, op, reducers, dimensions),
            Kind::BroadcastInDim { dimensions } => {
                write!(f, "{name} {operands}, dims = {dimensions:?} : {signature}")
            }
            Kind::Transpose { permutation } => write!(f, "{name} {operands}, dims = {permutation:?} : {signature}"),
            Kind::Concatenate { dimension } => write!(f, "{name} {operands}, dim = {dimension} : {signature}"),
            Kind::Slice { start, limit } => {
                let windows = start.iter().zip(limit).map(|(a, b)| format!("{a}:{b}:1"));
                write!(f, "{name} {operands} [{}] : {signature}", List(windows.collect::<Vec<_>>()))
            }
            Kind::DynamicSlice { sizes } => write!(f, "{name} {operands}, sizes = {sizes:?} : {signature}"),
            Kind::DynamicUpdateSlice => write!(f, "{name} {operands} : {signature}"),
            Kind::Pad { low, high } => {
                let interior = vec![0; low.len()];
                write!(f, "{name} {operands}, low = {low:?}, high = {high:?}, interior = {interior:?} : {signature}")
            }
            Kind::Gather(dimensions) => self.gather(f, op, dimensions),
            Kind::Scatter(dimensions, reducer) => self.scatter(f, op, dimensions, *reducer),
            Kind::While => self.while_loop(f, op, indent),
            Kind::ArgMax { dimension } => {
                write!(f, "\"{name}\"({operands}) <{{dimensions = {}}}> ", i64_array(&[*dimension]))?;
                region::arg_max(f, result.dtype)?;
                write!(f, " : ({}) -> ({})", self.types(&op.operands), self.types(&op.results))
            }
            Kind::Constrain(sharding) => write!(f, "{name} {operands} {sharding} : {result}"),
            Kind::Manual(manual) => self.manual(f, op, manual, indent),
            Kind::OptimizationBarrier => write!(f, "{name} {operands} : {}", self.types(&op.operands)),
            // Lowering removes these.
            Kind::Scan(_) | Kind::CustomVjp { .. } | Kind::Named(_) | Kind::StopGradient => Err(fmt::Error),
            Kind::CustomCall(call) => self.custom_call(f, op, call),
        }
    }

    /// Returns the types of the operands and of the first result.
    fn signature(&self, op: &Operation) -> String {
        format!("({}) -> {}", self.types(&op.operands), self.type_of(op.results[0]))
    }

    fn reduce(&self, f: &mut Formatter<'_>, op: &Operation, reducers: &[Reducer], dimensions: &[usize]) -> fmt::Result {
        let name = op.kind.name();
        let [reducer] = reducers else {
            let dtypes: Vec<Dtype> = op.results.iter().map(|id| self.type_of(*id).dtype).collect();
            write!(f, "\"{name}\"({}) <{{dimensions = {}}}> ", names(&op.operands), i64_array(dimensions))?;
            region::combine(f, reducers, &dtypes)?;
            return write!(f, " : ({}) -> ({})", self.types(&op.operands), self.types(&op.results));
        };
        let [operand, init] = [op.operands[0], op.operands[1]].map(Name);
        let apply = Kind::Binary(reducer.binary()).name();
        write!(f, "{name}({operand} init: {init}) applies {apply} ")?;
        write!(f, "across dimensions = {dimensions:?} : {}", self.signature(op))
    }

    fn gather(&self, f: &mut Formatter<'_>, op: &Operation, d: &GatherDimensions) -> fmt::Result {
        write!(
            f,
            "\"{}\"({}) <{{dimension_numbers = #stablehlo.gather<offset_dims = {:?}, \
             collapsed_slice_dims = {:?}, operand_batching_dims = {:?}, start_indices_batching_dims = {:?}, \
             start_index_map = {:?}, index_vector_dim = {}>, indices_are_sorted = false, slice_sizes = {}}}> \
             : {}",
            op.kind.name(),
            names(&op.operands),
            d.offset_dims,
            d.collapsed_slice_dims,
            d.operand_batching_dims,
            d.start_indices_batching_dims,
            d.start_index_map,
            d.index_vector_dim,
            i64_array(&d.slice_sizes),
            self.signature(op)
        )
    }

    fn scatter(&self, f: &mut Formatter<'_>, op: &Operation, d: &ScatterDimensions, reducer: Reducer) -> fmt::Result {
        write!(
            f,
            "\"{}\"({}) <{{indices_are_sorted = false, scatter_dimension_numbers = \
             #stablehlo.scatter<update_window_dims = {:?}, inserted_window_dims = {:?}, \
             input_batching_dims = {:?}, scatter_indices_batching_dims = {:?}, \
             scatter_dims_to_operand_dims = {:?}, index_vector_dim = {}>, unique_indices = false}}> ",
            op.kind.name(),
            names(&op.operands),
            d.update_window_dims,
            d.inserted_window_dims,
            d.input_batching_dims,
            d.scatter_indices_batching_dims,
            d.scatter_dims_to_operand_dims,
            d.index_vector_dim
        )?;
        region::combine(f, &[reducer], &[self.type_of(op.results[0]).dtype])?;
        write!(f, " : {}", self.signature(op))
    }

    fn while_loop(&self, f: &mut Formatter<'_>, op: &Operation, indent: usize) -> fmt::Result {
        let [condition, body] = &op.regions[..] else { return Err(fmt::Error) };
        // Both regions have the same arguments.
        let carried = condition.arguments.iter().zip(&op.operands).map(|(a, o)| format!("{} = {}", Name(*a), Name(*o)));
        let carried = List(carried.collect::<Vec<_>>());
        writeln!(f, "{}({carried}) : {}", op.kind.name(), self.types(&op.operands))?;
        writeln!(f, "{:indent$}cond {{", "")?;
        self.region(f, condition, indent + 2, "stablehlo.return")?;
        writeln!(f, "{:indent$}}} do {{", "")?;
        self.region(f, body, indent + 2, "stablehlo.return")?;
        write!(f, "{:indent$}}}", "")
    }

    fn custom_call(&self, f: &mut Formatter<'_>, op: &Operation, call: &CustomCall) -> fmt::Result {
        write!(f, "{} @{}({}) {{", op.kind.name(), call.target, names(&op.operands))?;
        write!(f, "api_version = 1 : i32, backend_config = {}", quoted(&call.backend_config))?;
        write!(f, ", has_side_effect = {}", call.has_side_effect)?;
        if call.row_major {
            let layouts = |ids: &[ValueId]| List(ids.iter().map(|id| row_major(self.type_of(*id))).collect::<Vec<_>>());
            write!(f, ", operand_layouts = [{}]", layouts(&op.operands))?;
            write!(f, ", result_layouts = [{}]", layouts(&op.results))?;
        }
        if !call.aliases.is_empty() {
            let tuple = |result: usize| if op.results.len() == 1 { vec![] } else { vec![result] };
            let aliases = call.aliases.iter().map(|(result, operand)| {
                format!(
                    "#stablehlo.output_operand_alias<output_tuple_indices = {:?}, operand_index = {operand}, \
                     operand_tuple_indices = []>",
                    tuple(*result)
                )
            });
            write!(f, ", output_operand_aliases = [{}]", List(aliases.collect::<Vec<_>>()))?;
        }
        write!(f, "}} : ({}) -> {}", self.types(&op.operands), self.result_types(op))
    }
}

impl Kind {
    /// Returns the operation's name in its dialect.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Unary(unary) => unary.name(),
            Self::Binary(binary) => binary.name(),
            Self::Constrain(_) => "sdy.sharding_constraint",
            Self::Manual(_) => "sdy.manual_computation",
            other => other.into(),
        }
    }
}

impl Unary {
    /// Returns the operation's name in StableHLO.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

impl Binary {
    /// Returns the operation's name in StableHLO.
    pub fn name(self) -> &'static str {
        self.into()
    }
}
