// SPDX-License-Identifier: Apache-2.0
//
// A sandbox that an agent serves, by what is written down of it.
#ifndef LAMINA_BACKENDS_AGENT_SANDBOX_H_
#define LAMINA_BACKENDS_AGENT_SANDBOX_H_

#include <memory>

#include "backends/backend.h"
#include "backends/record.h"
#include "backends/sandbox.h"
#include "backends/sandbox_directory.h"

namespace lamina::backends {

std::unique_ptr<Sandbox> MakeAgentSandbox(LauncherOptions options, const Backend* backend,
                                          Record record);

}  // namespace lamina::backends

#endif  // LAMINA_BACKENDS_AGENT_SANDBOX_H_
