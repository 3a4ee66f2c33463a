// SPDX-License-Identifier: Apache-2.0
//
// What Firecracker is asked for to make a machine.
#ifndef LAMINA_BACKENDS_FIRECRACKER_REQUESTS_H_
#define LAMINA_BACKENDS_FIRECRACKER_REQUESTS_H_

#include <string>
#include <vector>

#include "backends/firecracker/api.h"
#include "backends/vm/machine_plan.h"

namespace lamina::backends {

// What makes the machine of a plan, and starts it.
std::vector<ApiRequest> BootRequests(const MachinePlan& plan);
// The other way: from a directory with a snapshot.
std::vector<ApiRequest> LoadRequests(const std::string& snapshot);

}  // namespace lamina::backends

#endif  // LAMINA_BACKENDS_FIRECRACKER_REQUESTS_H_
