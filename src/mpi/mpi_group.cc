// libhalfbyte_mpi.so: a ProcessGroup by MPI. Apart from halfbyte itself, since the binary interface of MPI
// differs between its implementations: this one file is compiled with the MPI of the site, and opened where a
// launcher of MPI has started the tool.
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <thread>

#include "halfbyte/process_group.hpp"

namespace halfbyte {
namespace {

constexpr int kFailureTag = 1;
constexpr int64_t kMostBytes = int64_t{1} << 30;  // of one call, which counts in int

void check(int result, const char* what) {
  if (result == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(result, text, &length);
  throw std::runtime_error(std::string(what) + ": " + text);
}

class MpiGroup : public ProcessGroup {
 public:
  MpiGroup() {
    int provided = 0;
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided), "MPI_Init_thread");
    if (provided < MPI_THREAD_SERIALIZED)
      throw std::runtime_error("this MPI does not take calls of several threads (MPI_THREAD_SERIALIZED)");
    check(MPI_Comm_dup(MPI_COMM_WORLD, &world_), "MPI_Comm_dup");
    check(MPI_Comm_rank(world_, &rank_), "MPI_Comm_rank");
    check(MPI_Comm_size(world_, &size_), "MPI_Comm_size");
  }

  // Of all processes at once.
  ~MpiGroup() override {
    try {
      meet();
      while (others_failed()) {  // what was said and not asked for
      }
    } catch (const std::runtime_error&) {  // MPI ends the job by itself
    }
    MPI_Comm_free(&world_);
    MPI_Finalize();
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  std::vector<std::string> gather(const std::string& own) override {
    meet();
    const auto own_size = static_cast<int64_t>(own.size());
    std::vector<int64_t> sizes(static_cast<size_t>(size_));
    check(MPI_Allgather(&own_size, 1, MPI_INT64_T, sizes.data(), 1, MPI_INT64_T, world_), "MPI_Allgather");
    std::vector<std::string> all(static_cast<size_t>(size_));
    for (int from = 0; from < size_; ++from) {
      std::string& text = all[static_cast<size_t>(from)];
      const int64_t size = sizes[static_cast<size_t>(from)];
      text = from == rank_ ? own : std::string(static_cast<size_t>(size), '\0');
      for (int64_t at = 0; at < size; at += kMostBytes)
        check(MPI_Bcast(text.data() + at, static_cast<int>(std::min(kMostBytes, size - at)), MPI_CHAR, from,
                        world_),
              "MPI_Bcast");
    }
    return all;
  }

  void tell_failure() override {
    for (int to = 0; to < size_; ++to) {
      if (to == rank_) continue;
      MPI_Request request = MPI_REQUEST_NULL;  // of nothing: there is no memory to keep
      check(MPI_Isend(nullptr, 0, MPI_CHAR, to, kFailureTag, world_, &request), "MPI_Isend");
      check(MPI_Request_free(&request), "MPI_Request_free");
    }
  }

  bool others_failed() override {
    int found = 0;
    MPI_Status status;
    check(MPI_Iprobe(MPI_ANY_SOURCE, kFailureTag, world_, &found, &status), "MPI_Iprobe");
    if (found == 0) return false;
    check(MPI_Recv(nullptr, 0, MPI_CHAR, status.MPI_SOURCE, kFailureTag, world_, MPI_STATUS_IGNORE),
          "MPI_Recv");
    return true;
  }

 private:
  // Waits for all, asleep: collective calls of MPI keep a core busy, which others may need for hours.
  void meet() {
    MPI_Request request = MPI_REQUEST_NULL;
    check(MPI_Ibarrier(world_, &request), "MPI_Ibarrier");
    for (int done = 0;;) {
      check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
      if (done != 0) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  MPI_Comm world_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1;
};

}  // namespace
}  // namespace halfbyte

// The caller's to delete, before the process ends. Throws std::runtime_error.
extern "C" __attribute__((visibility("default"))) halfbyte::ProcessGroup* halfbyte_mpi_group() {
  return new halfbyte::MpiGroup;
}
