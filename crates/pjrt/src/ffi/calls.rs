//! The argument structs of the C calls, in the layout of C API 0.115.
//!
//! Tests compare sizes and offsets with the header of that version; libtpu (0.116) and the XLA CPU plugin (0.81) check
//! struct sizes in every call. The fields before the arrow are inputs, the fields after it are outputs.

use super::key_value::{Callback, GetArgs, PutArgs, TryGetArgs};
use super::{Handle, OutCounted, OutHandle, OutRagged, OutSlice, Program, RawNamedValue, Ref, Slice, Unused};

macro_rules! handles {
    ($( $(#[$doc:meta])* $name:ident, $slot:literal, $destroy:literal; )*) => {$(
        $(#[$doc])*
        #[repr(C)]
        pub(crate) struct $name {
            private: [u8; 0],
        }

        impl Handle for $name {
            const NAME: &'static str = $destroy;
            const SLOT: usize = $slot;
        }
    )*};
}

handles! {
    Event, 5, "PJRT_Event_Destroy";
    Client, 11, "PJRT_Client_Destroy";
    Executable, 40, "PJRT_Executable_Destroy";
    LoadedExecutable, 50, "PJRT_LoadedExecutable_Destroy";
    Buffer, 58, "PJRT_Buffer_Destroy";
    Topology, 83, "PJRT_TopologyDescription_Destroy";
}

/// A device. It belongs to its client and is never destroyed separately.
#[repr(C)]
pub(crate) struct Device {
    private: [u8; 0],
}

/// A device description. It belongs to its device or topology.
#[repr(C)]
pub(crate) struct DeviceDescription {
    private: [u8; 0],
}

/// Declares the argument structs of calls, and their table `SIZES` for a test.
macro_rules! calls {
    ($( $slot:literal $c_name:literal $name:ident<$life:lifetime> {
        $($input:ident: $input_type:ty,)* => $($output:ident: $output_type:ty,)*
    } )*) => {
        $(
            #[repr(C)]
            pub(crate) struct $name<$life> {
                header: $crate::ffi::Header,
                $( $input: $input_type, )*
                $( pub(crate) $output: $output_type, )*
                lifetime: std::marker::PhantomData<&$life ()>,
            }

            impl<$life> $name<$life> {
                /// The end of the last field, without trailing padding; `STRUCT_SIZE` in the header.
                const SIZE: usize = {
                    let ends = [
                        size_of::<$crate::ffi::Header>(),
                        $( std::mem::offset_of!(Self, $input) + size_of::<$input_type>(), )*
                        $( std::mem::offset_of!(Self, $output) + size_of::<$output_type>(), )*
                    ];
                    ends[ends.len() - 1]
                };

                pub(crate) fn new($($input: $input_type),*) -> Self {
                    $name {
                        header: $crate::ffi::Header::new(Self::SIZE),
                        $($input,)*
                        $($output: Default::default(),)*
                        lifetime: std::marker::PhantomData,
                    }
                }
            }

            // SAFETY: declared as in the header; see the tests below.
            unsafe impl $crate::ffi::Args for $name<'_> {
                const NAME: &'static str = $c_name;
                const SLOT: usize = $slot;
            }
        )*

        #[cfg(test)]
        const SIZES: &[(&str, usize, usize)] = &[$(($c_name, $slot, $name::SIZE)),*];
    };
}

pub(super) use calls;

calls! {
    3 "PJRT_Plugin_Initialize" PluginInitialize<'a> { => }
    4 "PJRT_Plugin_Attributes" PluginAttributes<'a> { => attributes: OutSlice<'static, RawNamedValue<'static>>, }

    6 "PJRT_Event_IsReady" EventIsReady<'a> { event: Ref<'a, Event>, => is_ready: bool, }
    8 "PJRT_Event_Await" EventAwait<'a> { event: Ref<'a, Event>, => }

    // `get`, `put` and `try_get` are inputs: key-value callbacks for jobs of several processes.
    10 "PJRT_Client_Create" ClientCreate<'a> {
        options: Slice<'a, RawNamedValue<'a>>, => get: Callback<GetArgs>, put: Callback<PutArgs>,
        client: OutHandle<Client>, try_get: Callback<TryGetArgs>,
    }
    12 "PJRT_Client_PlatformName" ClientPlatformName<'a> { client: Ref<'a, Client>, => name: OutSlice<'a, u8>, }
    14 "PJRT_Client_PlatformVersion" ClientPlatformVersion<'a> {
        client: Ref<'a, Client>, => version: OutSlice<'a, u8>,
    }
    15 "PJRT_Client_Devices" ClientDevices<'a> {
        client: Ref<'a, Client>, => devices: OutSlice<'a, Ref<'a, Device>>,
    }
    16 "PJRT_Client_AddressableDevices" ClientAddressableDevices<'a> {
        client: Ref<'a, Client>, => devices: OutSlice<'a, Ref<'a, Device>>,
    }
    20 "PJRT_Client_Compile" ClientCompile<'a> {
        client: Ref<'a, Client>, program: &'a Program<'a>, options: Slice<'a, u8>,
        => executable: OutHandle<LoadedExecutable>,
    }

    23 "PJRT_DeviceDescription_Id" DescriptionId<'a> { description: Ref<'a, DeviceDescription>, => id: i32, }
    24 "PJRT_DeviceDescription_ProcessIndex" DescriptionProcessIndex<'a> {
        description: Ref<'a, DeviceDescription>, => process_index: i32,
    }
    25 "PJRT_DeviceDescription_Attributes" DescriptionAttributes<'a> {
        description: Ref<'a, DeviceDescription>, => attributes: OutCounted<'a, RawNamedValue<'a>>,
    }
    26 "PJRT_DeviceDescription_Kind" DescriptionKind<'a> {
        description: Ref<'a, DeviceDescription>, => kind: OutSlice<'a, u8>,
    }
    27 "PJRT_DeviceDescription_DebugString" DescriptionDebugString<'a> {
        description: Ref<'a, DeviceDescription>, => text: OutSlice<'a, u8>,
    }
    29 "PJRT_Device_GetDescription" DeviceGetDescription<'a> {
        device: Ref<'a, Device>, => description: Option<Ref<'a, DeviceDescription>>,
    }
    34 "PJRT_Device_MemoryStats" DeviceMemoryStats<'a> {
        device: Ref<'a, Device>, => bytes_in_use: i64, peak_bytes_in_use: Maybe, num_allocs: Maybe,
        largest_alloc_size: Maybe, bytes_limit: Maybe, bytes_reserved: Maybe, peak_bytes_reserved: Maybe,
        bytes_reservable_limit: Maybe, largest_free_block_bytes: Maybe, pool_bytes: Maybe, peak_pool_bytes: Maybe,
        peak_allocated_bytes: i64, peak_allocated_bytes_is_set: bool,
    }

    41 "PJRT_Executable_Name" ExecutableName<'a> { executable: Ref<'a, Executable>, => name: OutSlice<'a, u8>, }
    42 "PJRT_Executable_NumReplicas" ExecutableNumReplicas<'a> { executable: Ref<'a, Executable>, => count: usize, }
    43 "PJRT_Executable_NumPartitions" ExecutableNumPartitions<'a> { executable: Ref<'a, Executable>, => count: usize, }
    44 "PJRT_Executable_NumOutputs" ExecutableNumOutputs<'a> { executable: Ref<'a, Executable>, => count: usize, }
    46 "PJRT_Executable_GetCostAnalysis" ExecutableGetCostAnalysis<'a> {
        executable: Ref<'a, Executable>, => properties: OutCounted<'a, RawNamedValue<'a>>,
    }
    51 "PJRT_LoadedExecutable_GetExecutable" LoadedGetExecutable<'a> {
        loaded: Ref<'a, LoadedExecutable>, => executable: OutHandle<Executable>,
    }
    52 "PJRT_LoadedExecutable_AddressableDevices" LoadedAddressableDevices<'a> {
        loaded: Ref<'a, LoadedExecutable>, => devices: OutSlice<'a, Ref<'a, Device>>,
    }
    // `overridden` are compile options that replace the executable's, `load_options` options of loading.
    56 "PJRT_Executable_DeserializeAndLoad" DeserializeAndLoad<'a> {
        client: Ref<'a, Client>, serialized: Slice<'a, u8>,
        => executable: OutHandle<LoadedExecutable>, overridden: Unused<2>, load_options: Unused<1>,
    }

    59 "PJRT_Buffer_ElementType" BufferElementType<'a> { buffer: Ref<'a, Buffer>, => code: i32, }
    60 "PJRT_Buffer_Dimensions" BufferDimensions<'a> { buffer: Ref<'a, Buffer>, => dims: OutSlice<'a, i64>, }
    65 "PJRT_Buffer_Device" BufferDevice<'a> { buffer: Ref<'a, Buffer>, => device: Option<Ref<'a, Device>>, }
    67 "PJRT_Buffer_Delete" BufferDelete<'a> { buffer: Ref<'a, Buffer>, => }
    68 "PJRT_Buffer_IsDeleted" BufferIsDeleted<'a> { buffer: Ref<'a, Buffer>, => is_deleted: bool, }
    72 "PJRT_Buffer_ReadyEvent" BufferReadyEvent<'a> { buffer: Ref<'a, Buffer>, => event: OutHandle<Event>, }

    82 "PJRT_TopologyDescription_Create" TopologyCreate<'a> {
        name: Slice<'a, u8>, options: Slice<'a, RawNamedValue<'a>>, => topology: OutHandle<Topology>,
    }
    84 "PJRT_TopologyDescription_PlatformName" TopologyPlatformName<'a> {
        topology: Ref<'a, Topology>, => name: OutSlice<'a, u8>,
    }
    85 "PJRT_TopologyDescription_PlatformVersion" TopologyPlatformVersion<'a> {
        topology: Ref<'a, Topology>, => version: OutSlice<'a, u8>,
    }
    86 "PJRT_TopologyDescription_GetDeviceDescriptions" TopologyDescriptions<'a> {
        topology: Ref<'a, Topology>, => descriptions: OutSlice<'a, Ref<'a, DeviceDescription>>,
    }
    // With a client, the compiler could inspect the devices of this machine.
    89 "PJRT_Compile" TopologyCompile<'a> {
        topology: Ref<'a, Topology>, program: &'a Program<'a>, options: Slice<'a, u8>,
        => client: Unused<1>, executable: OutHandle<Executable>,
    }

    90 "PJRT_Executable_OutputElementTypes" ExecutableOutputTypes<'a> {
        executable: Ref<'a, Executable>, => codes: OutSlice<'a, i32>,
    }
    91 "PJRT_Executable_OutputDimensions" ExecutableOutputDims<'a> {
        executable: Ref<'a, Executable>, => dims: OutRagged<'a>,
    }
    96 "PJRT_Executable_GetCompiledMemoryStats" ExecutableMemoryStats<'a> {
        executable: Ref<'a, Executable>, => generated_code: i64, argument: i64, output: i64, alias: i64, temp: i64,
        host_generated_code: i64, host_argument: i64, host_output: i64, host_alias: i64, host_temp: i64, peak: i64,
        total: i64, total_allocation: i64, indefinite_allocations: i64, peak_unpadded_heap: i64,
    }
}

/// `int64_t` and `bool`: a number that the plugin may not report.
#[repr(C)]
#[derive(Default)]
pub(crate) struct Maybe {
    value: i64,
    is_set: bool,
}

impl Maybe {
    pub(crate) fn get(&self) -> Option<i64> {
        self.is_set.then_some(self.value)
    }
}

#[cfg(test)]
mod tests {
    use super::SIZES;

    /// `*_Args_STRUCT_SIZE` in the header of C API 0.115, and the index of each function in the table.
    #[test]
    fn argument_layouts_match_the_header() {
        let header = [
            ("PJRT_Plugin_Initialize", 3, 16),
            ("PJRT_Plugin_Attributes", 4, 32),
            ("PJRT_Event_IsReady", 6, 25),
            ("PJRT_Event_Await", 8, 24),
            ("PJRT_Client_Create", 10, 88),
            ("PJRT_Client_PlatformName", 12, 40),
            ("PJRT_Client_PlatformVersion", 14, 40),
            ("PJRT_Client_Devices", 15, 40),
            ("PJRT_Client_AddressableDevices", 16, 40),
            ("PJRT_Client_Compile", 20, 56),
            ("PJRT_DeviceDescription_Id", 23, 28),
            ("PJRT_DeviceDescription_ProcessIndex", 24, 28),
            ("PJRT_DeviceDescription_Attributes", 25, 40),
            ("PJRT_DeviceDescription_Kind", 26, 40),
            ("PJRT_DeviceDescription_DebugString", 27, 40),
            ("PJRT_Device_GetDescription", 29, 32),
            ("PJRT_Device_MemoryStats", 34, 201),
            ("PJRT_Executable_Name", 41, 40),
            ("PJRT_Executable_NumReplicas", 42, 32),
            ("PJRT_Executable_NumPartitions", 43, 32),
            ("PJRT_Executable_NumOutputs", 44, 32),
            ("PJRT_Executable_GetCostAnalysis", 46, 40),
            ("PJRT_LoadedExecutable_GetExecutable", 51, 32),
            ("PJRT_LoadedExecutable_AddressableDevices", 52, 40),
            ("PJRT_Executable_DeserializeAndLoad", 56, 72),
            ("PJRT_Buffer_ElementType", 59, 28),
            ("PJRT_Buffer_Dimensions", 60, 40),
            ("PJRT_Buffer_Device", 65, 32),
            ("PJRT_Buffer_Delete", 67, 24),
            ("PJRT_Buffer_IsDeleted", 68, 25),
            ("PJRT_Buffer_ReadyEvent", 72, 32),
            ("PJRT_TopologyDescription_Create", 82, 56),
            ("PJRT_TopologyDescription_PlatformName", 84, 40),
            ("PJRT_TopologyDescription_PlatformVersion", 85, 40),
            ("PJRT_TopologyDescription_GetDeviceDescriptions", 86, 40),
            ("PJRT_Compile", 89, 64),
            ("PJRT_Executable_OutputElementTypes", 90, 40),
            ("PJRT_Executable_OutputDimensions", 91, 48),
            ("PJRT_Executable_GetCompiledMemoryStats", 96, 144),
        ];
        assert_eq!(SIZES, header);
    }
}
