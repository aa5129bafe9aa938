// Whether a launcher of MPI has started several processes of the tool, and what connects them.
#pragma once

#include <memory>

#include "halfbyte/process_group.hpp"

namespace halfbyte::cli {

// How many processes mpirun, mpiexec or srun has started, by the variables of Open MPI, of MPICH and those
// like it, and of Slurm; 1: there are no others, or HALFBYTE_MPI is set and empty.
int num_launched_processes();

// By MPI. Null for one process. Error(usage) where libhalfbyte_mpi.so (HALFBYTE_MPI, or beside the tool or
// its library) is not there or does not work.
std::shared_ptr<ProcessGroup> process_group();

inline bool leads(const ProcessGroup* group) { return group == nullptr || group->rank() == 0; }

// What a process does before the operation of all: an error of it is the error of all. `group` may be null.
template <class Work>
auto before_all(ProcessGroup* group, const Work& work) {
  try {
    return work();
  } catch (const Error& error) {
    if (group == nullptr) throw;
    throw fail_together(*group, error);
  }
}

}  // namespace halfbyte::cli
