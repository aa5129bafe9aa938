// The machine: CUDA devices, streams and memory.
#include "halfbyte/device.hpp"

#include "capi/support.h"
#include "halfbyte/system.hpp"

using namespace halfbyte;
using namespace halfbyte::capi;

struct halfbyte_cuda {
  CudaInfo info;
};
struct halfbyte_stream {
  Stream stream;
};
struct halfbyte_memory {
  Memory memory;
};

namespace {

// As long as the process, without an end: others may ask while it ends.
struct SystemText {
  SystemInfo info = system_info();
  std::string compiled_targets = fmt::format("{}", fmt::join(info.compiled_targets, " "));
};
const SystemText& system_text() {
  static const SystemText& text = *new SystemText;
  return text;
}

}  // namespace

halfbyte_status halfbyte_device_find(const char* word, DLDevice* device) {
  return guard([&] { required(device, "device") = to_dlpack(parse_device(&required(word, "word"))); });
}

halfbyte_status halfbyte_get_system_info(halfbyte_system_info* info) {
  return guard([&] {
    const SystemText& text = system_text();
    write_struct(info,
                 {0, text.info.version.c_str(), text.info.simd_target.c_str(), text.compiled_targets.c_str(),
                  text.info.num_threads},
                 "info");
  });
}

halfbyte_status halfbyte_cuda_query(halfbyte_cuda** cuda) {
  return guard([&] {
    required(cuda, "cuda");
    *cuda = new halfbyte_cuda{cuda_info()};
  });
}
void halfbyte_cuda_destroy(halfbyte_cuda* cuda) { delete cuda; }

halfbyte_status halfbyte_cuda_get_info(const halfbyte_cuda* cuda, halfbyte_cuda_info* info) {
  return guard([&] {
    const CudaInfo& of = required(cuda, "cuda").info;
    write_struct(info,
                 {0, of.problem.c_str(), of.driver_path.c_str(), of.nvrtc_path.c_str(), of.driver_version,
                  of.nvrtc_version, of.cache_directory.c_str(), of.cache_problem.c_str(),
                  static_cast<int64_t>(of.devices.size())},
                 "info");
  });
}

halfbyte_status halfbyte_cuda_get_device(const halfbyte_cuda* cuda, int64_t index,
                                         halfbyte_cuda_device* device) {
  return guard([&] {
    const CudaDevice& of = element(required(cuda, "cuda").info.devices, index, "devices");
    write_struct(device,
                 {0, of.name.c_str(), of.target.c_str(), of.problem.c_str(), of.index, of.capability,
                  of.num_multiprocessors, of.memory_bytes},
                 "device");
  });
}

halfbyte_status halfbyte_check_device(DLDevice device) {
  return guard([&] { check_device(from_dlpack(device)); });
}

halfbyte_status halfbyte_stream_create(DLDevice device, halfbyte_stream** stream) {
  return guard([&] {
    required(stream, "stream");
    *stream = new halfbyte_stream{Stream(from_dlpack(device))};
  });
}
void* halfbyte_stream_handle(const halfbyte_stream* stream) {
  return stream == nullptr ? nullptr : stream->stream.handle();
}
halfbyte_status halfbyte_stream_synchronize(const halfbyte_stream* stream) {
  return guard([&] { required(stream, "stream").stream.synchronize(); });
}
void halfbyte_stream_destroy(halfbyte_stream* stream) { delete stream; }

halfbyte_status halfbyte_memory_create(DLDevice device, int64_t num_bytes, halfbyte_memory** memory) {
  return guard([&] {
    required(memory, "memory");
    *memory = new halfbyte_memory{Memory(from_dlpack(device), num_bytes)};
  });
}
halfbyte_status halfbyte_memory_create_host(DLDevice device, int64_t num_bytes, halfbyte_memory** memory) {
  return guard([&] {
    required(memory, "memory");
    *memory = new halfbyte_memory{Memory::host(from_dlpack(device), num_bytes)};
  });
}
void* halfbyte_memory_data(const halfbyte_memory* memory) {
  return memory == nullptr ? nullptr : memory->memory.data();
}
void halfbyte_memory_destroy(halfbyte_memory* memory) { delete memory; }

halfbyte_status halfbyte_copy(DLDevice device, void* to, const void* from, int64_t num_bytes, void* stream) {
  return guard([&] {
    if (num_bytes > 0 && (to == nullptr || from == nullptr)) refuse("copy: to and from must not be NULL");
    copy(from_dlpack(device), to, from, num_bytes, stream);
  });
}
