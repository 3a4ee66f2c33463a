# SPDX-License-Identifier: Apache-2.0
#
# lamina_proto(<target> <file.proto>): a library with the messages and services of the file, which is
# named by its path from the root. It is generated into the build directory: what fs/control/control.proto
# defines is in "fs/control/control.pb.h" and "fs/control/control.grpc.pb.h".
find_package(Protobuf REQUIRED)
pkg_check_modules(grpcpp REQUIRED IMPORTED_TARGET grpc++)
find_program(LAMINA_GRPC_PLUGIN grpc_cpp_plugin REQUIRED)

function(lamina_proto target file)
  string(REGEX REPLACE "[.]proto$" "" stem "${CMAKE_BINARY_DIR}/${file}")
  set(generated ${stem}.pb.cc ${stem}.pb.h ${stem}.grpc.pb.cc ${stem}.grpc.pb.h)
  add_custom_command(
    OUTPUT ${generated}
    COMMAND protobuf::protoc --proto_path=${CMAKE_SOURCE_DIR} --cpp_out=${CMAKE_BINARY_DIR}
            --grpc_out=${CMAKE_BINARY_DIR} --plugin=protoc-gen-grpc=${LAMINA_GRPC_PLUGIN} ${file}
    WORKING_DIRECTORY ${CMAKE_SOURCE_DIR}
    DEPENDS ${CMAKE_SOURCE_DIR}/${file}
    VERBATIM)
  # Generated code, which has warnings of its own.
  add_library(${target} STATIC ${generated})
  target_compile_options(${target} PRIVATE -w)
  target_include_directories(${target} SYSTEM PUBLIC ${CMAKE_BINARY_DIR})
  target_link_libraries(${target} PUBLIC protobuf::libprotobuf PkgConfig::grpcpp)
endfunction()
