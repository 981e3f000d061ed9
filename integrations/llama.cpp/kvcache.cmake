# Makes the cache a part of libllama: the adapter in src/, and the core of this repository. llama.cpp's src/CMakeLists.txt,
# as a patch has it, includes this file where -DLLAMA_KVCACHE=<this folder> is given. Needs CMake 3.21.
option(LLAMA_KVCACHE_SYSTEM "llama: link to the installed libkvcache that pkg-config finds" OFF)
option(LLAMA_KVCACHE_VALKEY "llama: keep prompts on servers of Valkey or Redis, too, through hiredis" OFF)
set(KVCACHE_SANITIZE "" CACHE STRING "sanitizers for this repository's sources alone; llama.cpp has options for its own")

file(GLOB kvcache_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/src/*.cpp)
set_source_files_properties(${kvcache_sources} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
target_sources(llama PRIVATE ${kvcache_sources})
target_include_directories(llama PRIVATE ${CMAKE_CURRENT_LIST_DIR}/src)
target_compile_definitions(llama PRIVATE LLAMA_USE_KVCACHE)
if(KVCACHE_SANITIZE)
  set(sanitize "-fsanitize=${KVCACHE_SANITIZE}" -fno-sanitize-recover=all)
  set_source_files_properties(${kvcache_sources} PROPERTIES COMPILE_OPTIONS "${sanitize}")
  target_link_options(llama PUBLIC ${sanitize})
endif()

if(LLAMA_KVCACHE_SYSTEM)
  find_package(PkgConfig REQUIRED)
  pkg_check_modules(KVCACHE REQUIRED IMPORTED_TARGET kvcache)
  target_link_libraries(llama PRIVATE PkgConfig::KVCACHE)
else()
  # The core's own build says how it is compiled. Its objects go into libllama, which keeps their names to itself.
  add_subdirectory(${CMAKE_CURRENT_LIST_DIR}/../.. kvcache EXCLUDE_FROM_ALL)
  target_compile_definitions(kvcache_objects PRIVATE KVC_API=)
  target_compile_options(kvcache_objects PRIVATE -Wno-cast-qual -Wno-shadow) # which llama.cpp asks for
  target_sources(llama PRIVATE $<TARGET_OBJECTS:kvcache_objects>)
  target_include_directories(llama PRIVATE ${CMAKE_CURRENT_LIST_DIR}/../../include)
  find_package(Threads REQUIRED)
  target_link_libraries(llama PRIVATE Threads::Threads m)
  get_target_property(kvcache_libraries kvcache_objects LINK_LIBRARIES)
  if("OpenMP::OpenMP_C" IN_LIST kvcache_libraries)
    find_package(OpenMP REQUIRED COMPONENTS C)
    target_link_libraries(llama PRIVATE $<LINK_ONLY:OpenMP::OpenMP_C>)
  endif()
endif()

if(LLAMA_KVCACHE_VALKEY)
  find_package(PkgConfig REQUIRED)
  pkg_check_modules(HIREDIS REQUIRED IMPORTED_TARGET hiredis)
  target_sources(llama PRIVATE ${CMAKE_CURRENT_LIST_DIR}/../valkey/valkey_store.c)
  set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/src/llama-kvcache-store.cpp PROPERTIES
                              COMPILE_DEFINITIONS LLAMA_KVCACHE_VALKEY
                              INCLUDE_DIRECTORIES ${CMAKE_CURRENT_LIST_DIR}/../valkey)
  target_link_libraries(llama PRIVATE PkgConfig::HIREDIS)
endif()

# Without this header ggml's products on AMX end the process, where it is compiled with this GCC.
if(TARGET ggml-base AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  set_source_files_properties(${PROJECT_SOURCE_DIR}/ggml/src/ggml-cpu/amx/mmq.cpp TARGET_DIRECTORY ggml-base
                              PROPERTIES COMPILE_OPTIONS "-include;${CMAKE_CURRENT_LIST_DIR}/src/ggml-amx-gcc.h")
endif()

# The adapter's own tests, one program each, beside llama.cpp's.
if(LLAMA_BUILD_COMMON AND LLAMA_BUILD_TESTS)
  add_custom_target(kvcache-tests)
  file(GLOB kvcache_tests CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/tests/test-*.cpp)
  foreach(source ${kvcache_tests})
    cmake_path(GET source STEM test)
    add_executable(${test} EXCLUDE_FROM_ALL ${source})
    target_compile_options(${test} PRIVATE ${sanitize})
    target_include_directories(${test} PRIVATE . ${CMAKE_CURRENT_LIST_DIR}/src ${CMAKE_CURRENT_LIST_DIR}/../../include)
    target_link_libraries(${test} PRIVATE llama llama-common)
    add_dependencies(kvcache-tests ${test})
  endforeach()
endif()
