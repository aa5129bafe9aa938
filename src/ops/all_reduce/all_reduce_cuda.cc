// Members of a group on CUDA devices: a kernel that writes into the memory of the others, and NCCL.
#include "ops/all_reduce/all_reduce_cuda.h"

#include <algorithm>
#include <cstring>

#include "core/arithmetic.h"
#include "core/checks.h"
#include "cuda/config.h"
#include "cuda/nccl.h"
#include "ops/all_reduce/all_reduce_args.h"

namespace halfbyte {
namespace {

using cuda::Context;

cuda::KernelSpec lines_kernel(DType dtype) {
  return {"ops/all_reduce/all_reduce_lines.cu", "all_reduce_lines",
          cuda::config_text(cuda::element_config(dtype))};
}
cuda::KernelSpec chunks_kernel(DType dtype, bool pieces) {
  return {
      "ops/all_reduce/all_reduce_chunks.cu", "all_reduce_chunks",
      cuda::config_text(cuda::element_config(dtype) + fmt::format("constexpr bool kPieces = {};\n", pieces))};
}

// ---- Memory of each other

// What members share. It lives as long as one of them.
struct PeerGroup {
  std::vector<Memory> inboxes;  // of each member: lines, chunks, flags, state
  Memory aborted;               // u32, on the host

  std::atomic_ref<uint32_t> aborted_word() const {
    return std::atomic_ref(*reinterpret_cast<uint32_t*>(aborted.data()));
  }
};

// Why devices cannot write into each other's memory; empty: they can, and this process has asked for it.
std::string enable_peers(std::span<const Device> devices) {
  const cuda::Driver& driver = cuda::driver();
  if (devices.size() > kMaxPeers)
    return fmt::format("a group by peer memory has at most {} members, not {}", kMaxPeers, devices.size());
  for (const Device& from : devices)
    for (const Device& to : devices) {
      if (from == to) continue;
      const Context &own = cuda::context(from.index), &other = cuda::context(to.index);
      int can = 0;
      cuda::check(driver.cuDeviceCanAccessPeer(&can, own.device, other.device), "cuDeviceCanAccessPeer");
      if (can == 0) return fmt::format("{} cannot access memory of {}", to_string(from), to_string(to));
      constexpr cuda::CUresult kAlreadyEnabled = 704;
      const cuda::Scope scope(own);
      const cuda::CUresult result = driver.cuCtxEnablePeerAccess(other.context, 0);
      if (result != kAlreadyEnabled) cuda::check(result, "cuCtxEnablePeerAccess");
    }
  return "";
}

// Where the parts of an inbox begin, and how long it is.
struct InboxLayout {
  int64_t chunks, flags, state, num_bytes;
  explicit InboxLayout(int64_t size)
      : chunks(2 * size * kMostLines * int64_t{sizeof(AllReduceLine)}),
        flags(chunks + 2 * size * kMostChunkBytes),
        state(flags + 2 * 2 * size * kMostChunkBlocks * int64_t{sizeof(uint32_t)}),
        num_bytes(state + int64_t{sizeof(AllReduceState)}) {}
};

std::shared_ptr<PeerGroup> make_peers(std::span<const Device> devices) {
  auto group = std::make_shared<PeerGroup>();
  const InboxLayout layout(std::ssize(devices));
  for (const Device& device : devices) {
    const cuda::Scope scope(cuda::context(device.index));
    const Memory& inbox = group->inboxes.emplace_back(device, layout.num_bytes);
    cuda::fill(inbox.data(), 0, inbox.num_bytes(), nullptr);
    cuda::synchronize(nullptr);
  }
  group->aborted = Memory::host(devices.front(), sizeof(uint32_t));
  group->aborted_word() = 0;
  return group;
}

// How far lines are faster, of bytes that a member writes to all others: later each costs as much as two of
// chunks, but no wait for a flag behind them. H200, 2 and 4 devices (bench/RESULTS.md).
constexpr int64_t kMostLineBytes = 256 << 10;
// What a second exchange takes, in bytes that could be written meanwhile.
constexpr int64_t kExchangeBytes = 900 << 10;

struct PeerMember {
  std::shared_ptr<PeerGroup> group;
  // It starts before the kernel before it has ended; graphs keep such launches since CUDA 12.3.
  bool early = false;
  struct Kernels {
    cuda::CUfunction lines, chunks, pieces;
  };
  Kernels f32{}, bf16{}, f16{};
  AllReduceArgs args{};  // but for x

  PeerMember(std::shared_ptr<PeerGroup> of, const Context& context, int rank) : group(std::move(of)) {
    const auto kernels_of = [&](DType dtype) {
      return Kernels{cuda::get_kernel(context, lines_kernel(dtype)),
                     cuda::get_kernel(context, chunks_kernel(dtype, false)),
                     cuda::get_kernel(context, chunks_kernel(dtype, true))};
    };
    f32 = kernels_of(DType::f32);
    bf16 = kernels_of(DType::bf16);
    f16 = kernels_of(DType::f16);
    early = context.capability >= 90 && cuda::driver().version >= 12030;
    args.rank = rank;
    args.size = static_cast<int32_t>(group->inboxes.size());
    const InboxLayout layout(args.size);
    for (int i = 0; i < args.size; ++i) {
      std::byte* const inbox = group->inboxes[static_cast<size_t>(i)].data();
      args.inbox[i] = {reinterpret_cast<AllReduceLine*>(inbox),
                       reinterpret_cast<unsigned char*>(inbox + layout.chunks),
                       reinterpret_cast<uint32_t*>(inbox + layout.flags)};
      if (i == rank) args.state = reinterpret_cast<AllReduceState*>(inbox + layout.state);
    }
    args.aborted = reinterpret_cast<const uint32_t*>(group->aborted.data());
  }

  // In the current context.
  void all_reduce(const TensorView& x, void* stream) const {
    const Kernels& kernels = x.dtype == DType::f32 ? f32 : x.dtype == DType::bf16 ? bf16 : f16;
    const int64_t size = size_of(x.dtype), others = args.size - 1;
    auto* at = static_cast<std::byte*>(x.data);
    // All members must take the same way: by what is the same for all, which addresses are not.
    for (int64_t left = num_elements(x) * size, now = 0; left > 0; at += now, left -= now) {
      const bool by_lines = left * others <= kMostLineBytes || left < 16;
      const bool pieces = !by_lines && left * others * (others - 1) / args.size > kExchangeBytes;
      constexpr int64_t kInRegisters = int64_t{kMostChunkBlocks} * kChunkThreads * kChunkVectors * 16;
      now = by_lines ? std::min<int64_t>(left, 8 * kMostLines)
                     : std::min<int64_t>(left / 16 * 16, pieces ? kMostChunkBytes : kInRegisters);
      const cuda::CUfunction function = by_lines ? kernels.lines : pieces ? kernels.pieces : kernels.chunks;
      const int threads = by_lines ? kLineThreads : kChunkThreads;
      const int64_t blocks = ceil_div(ceil_div(now, by_lines ? 8 : pieces ? 16 * args.size : 16), threads);
      AllReduceArgs own = args;
      own.x = at;
      own.num_elements = now / size;
      const cuda::Grid grid{std::min<int64_t>(blocks, by_lines ? kMostLineBlocks : kMostChunkBlocks),
                            threads};
      (early ? cuda::launch_early<AllReduceArgs> : cuda::launch<AllReduceArgs>)(function, grid, stream, own);
    }
  }
};

// ---- NCCL

// What members share: those of this process.
struct NcclGroup {
  std::vector<cuda::ncclComm> comms;
  std::atomic<bool> aborted = false;

  ~NcclGroup() {
    if (aborted) return;
    for (cuda::ncclComm comm : comms) cuda::find_nccl().ncclCommDestroy(comm);
  }
  void abort() {
    if (aborted.exchange(true)) return;
    for (cuda::ncclComm comm : comms) cuda::find_nccl().ncclCommAbort(comm);
  }
};

const cuda::Nccl& nccl() {
  const cuda::Nccl& found = cuda::find_nccl();
  HALFBYTE_CHECK(found.problem.empty(), device, "communicator: {}", found.problem);
  return found;
}

std::string nccl_text() {
  const int version = nccl().version;
  return fmt::format("NCCL {}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

std::shared_ptr<NcclGroup> make_nccl(std::span<const Device> devices) {
  auto group = std::make_shared<NcclGroup>();
  std::vector<int> indices;
  for (const Device& device : devices) indices.push_back(device.index);
  std::vector<cuda::ncclComm> comms(devices.size());
  cuda::check_nccl(nccl().ncclCommInitAll(comms.data(), static_cast<int>(comms.size()), indices.data()),
                   "ncclCommInitAll", nullptr);
  group->comms = std::move(comms);
  return group;
}

struct NcclMember {
  std::shared_ptr<NcclGroup> group;
  cuda::ncclComm comm = nullptr;

  // In the current context.
  void all_reduce(const TensorView& x, void* stream) const {
    const cuda::Nccl& found = cuda::find_nccl();
    int error = 0;
    cuda::check_nccl(found.ncclCommGetAsyncError(comm, &error), "ncclCommGetAsyncError", comm);
    cuda::check_nccl(error, "all_reduce", comm);
    constexpr int kSum = 0;  // ncclSum
    cuda::check_nccl(
        found.ncclAllReduce(x.data, x.data, static_cast<size_t>(num_elements(x)), cuda::nccl_type(x.dtype),
                            kSum, comm, static_cast<cuda::CUstream>(stream)),
        "ncclAllReduce", comm);
  }
};

// ---- A member

// Of x, where there is NCCL too, which is faster from here on with four devices (bench/RESULTS.md).
constexpr int64_t kMostPeerBytes = 8 << 20;

struct CudaMember : Communicator::Impl {
  const Context* context = nullptr;
  std::optional<PeerMember> peer;
  std::optional<NcclMember> nccl;

  void all_reduce(const TensorView& x, void* stream) override {
    if (size == 1 || num_elements(x) == 0) return;
    const bool aborted = (peer && peer->group->aborted_word() != 0) || (nccl && nccl->group->aborted);
    HALFBYTE_CHECK(!aborted, cancelled, "{}", kGroupAborted);
    const cuda::Scope scope(*context);
    cuda::check_stream(stream);
    if (peer && (!nccl || num_elements(x) * size_of(x.dtype) <= kMostPeerBytes))
      peer->all_reduce(x, stream);
    else
      nccl->all_reduce(x, stream);
  }
  void abort() override {
    if (peer) peer->group->aborted_word() = 1;
    if (nccl) nccl->group->abort();
  }
};

}  // namespace

std::vector<std::shared_ptr<Communicator::Impl>> communicators_of_cuda(std::span<const Device> devices,
                                                                       Transport transport) {
  for (const Device& device : devices) {
    check_device(device);
    // Members would wait for each other: what allocates or loads for one of them waits for the device.
    HALFBYTE_CHECK(std::ranges::count(devices, device) == 1, usage,
                   "communicator: CUDA devices must differ, got {}", to_string(devices));
  }
  std::shared_ptr<PeerGroup> peers;
  if (transport != Transport::nccl) {
    const std::string problem = enable_peers(devices);
    HALFBYTE_CHECK(problem.empty() || transport == Transport::automatic, device, "communicator: {}", problem);
    if (problem.empty()) peers = make_peers(devices);
  }
  std::shared_ptr<NcclGroup> of_nccl;
  const bool may = devices.size() > 1 && transport != Transport::peer;
  if (may && (!peers || cuda::find_nccl().problem.empty())) try {
      of_nccl = make_nccl(devices);
    } catch (const Error&) {
      if (!peers) throw;  // it is there, and cannot be used
    }

  std::vector<std::shared_ptr<Communicator::Impl>> members;
  for (size_t i = 0; i < devices.size(); ++i) {
    auto member = std::make_shared<CudaMember>();
    member->context = &cuda::context(devices[i].index);
    const cuda::Scope scope(*member->context);
    if (peers) member->peer.emplace(peers, *member->context, static_cast<int>(i));
    if (of_nccl) member->nccl = NcclMember{of_nccl, of_nccl->comms[i]};
    member->transport = peers ? "peer memory" : of_nccl ? "" : "none";
    if (peers && of_nccl) member->transport += fmt::format(" to {} bytes, ", kMostPeerBytes);
    if (of_nccl) member->transport += nccl_text();
    members.push_back(std::move(member));
  }
  return members;
}

std::string create_nccl_id() {
  cuda::ncclUniqueId id;
  cuda::check_nccl(nccl().ncclGetUniqueId(&id), "ncclGetUniqueId", nullptr);
  static_assert(sizeof id == Communicator::kIdBytes);
  return {id.internal, sizeof id};
}

std::shared_ptr<Communicator::Impl> connect_cuda(Device device, const std::string& id, int rank, int size) {
  check_device(device);
  auto member = std::make_shared<CudaMember>();
  member->context = &cuda::context(device.index);
  const cuda::Scope scope(*member->context);
  cuda::ncclUniqueId unique;
  std::memcpy(&unique, id.data(), sizeof unique);
  auto group = std::make_shared<NcclGroup>();
  cuda::ncclComm comm = nullptr;
  cuda::check_nccl(nccl().ncclCommInitRank(&comm, size, unique, rank), "ncclCommInitRank", nullptr);
  group->comms = {comm};
  member->nccl = NcclMember{std::move(group), comm};
  member->transport = nccl_text();
  return member;
}

std::vector<cuda::Kernel> all_reduce_kernels() {
  const KernelKey dtype{"dtype", {"f32", "f16", "bf16"}, false, "The dtype of x."};
  return {
      {{"all_reduce", "all_reduce_lines", "Sums over devices that write to each other, of little.", {dtype}},
       [](const cuda::KernelValues& values) { return lines_kernel(parse_dtype(values.at("dtype"))); },
       true},
      {{"all_reduce",
        "all_reduce_chunks",
        "The same of more.",
        {dtype, cuda::flag_key("pieces", "Each sums a piece, and hands it out.")}},
       [](const cuda::KernelValues& values) {
         return chunks_kernel(parse_dtype(values.at("dtype")), cuda::is_set(values, "pieces"));
       },
       true}};
}

}  // namespace halfbyte
