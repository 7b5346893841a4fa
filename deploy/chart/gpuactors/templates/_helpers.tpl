{{/* Name of the application: a label. */}}
{{- define "gpuactors.name" -}}
{{ .Values.nameOverride | default .Chart.Name }}
{{- end }}

{{/* Name of the objects. It is that of deploy/base whatever the release is called, so each can replace the other. */}}
{{- define "gpuactors.fullname" -}}
{{ .Values.fullnameOverride | default (include "gpuactors.name" .) }}
{{- end }}

{{/* What selects the pods, which a DaemonSet can never change. Without fullnameOverride it is that of deploy/base. */}}
{{- define "gpuactors.selector" -}}
app.kubernetes.io/name: {{ include "gpuactors.name" . }}
{{- if .Values.fullnameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- end }}

{{/* Labels of pods and of every object. */}}
{{- define "gpuactors.commonLabels" -}}
app.kubernetes.io/name: {{ include "gpuactors.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{/* Labels of every object. */}}
{{- define "gpuactors.labels" -}}
{{ include "gpuactors.commonLabels" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* Labels of what Prometheus' operator looks for; it may choose by labels of its own. */}}
{{- define "gpuactors.monitoringLabels" -}}
{{ include "gpuactors.labels" . }}
{{- with .Values.monitoring.labels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Where docs/ is read unless a value says it, as deploy/monitoring has it: `just addresses` writes it. */}}
{{- define "gpuactors.documents" -}}
https://gpuactors.example/docs
{{- end }}

{{- define "gpuactors.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}
{{- end }}

{{- define "gpuactors.account" -}}
{{ .Values.serviceAccount.name | default (include "gpuactors.fullname" .) }}
{{- end }}

{{/* The pod's account, as the API server names it in a request. */}}
{{- define "gpuactors.username" -}}
system:serviceaccount:{{ .Release.Namespace }}:{{ include "gpuactors.account" . }}
{{- end }}

{{/* Whether a request to the API server is the pod's, for an admission policy. */}}
{{- define "gpuactors.ours" -}}
request.userInfo.username == "{{ include "gpuactors.username" . }}"
{{- end }}

{{/* The subject of every binding. */}}
{{- define "gpuactors.subjects" -}}
- kind: ServiceAccount
  name: {{ include "gpuactors.account" . }}
  namespace: {{ .Release.Namespace }}
{{- end }}

{{/* "true" if drivers of GPUs are changed: unbind, bind, driver_override. */}}
{{- define "gpuactors.binds" -}}
{{- if and .Values.dra.enabled (not .Values.dra.allPrebound) }}true{{ end }}
{{- end }}

{{/* "true" if the host's processes are read. */}}
{{- define "gpuactors.processes" -}}
{{- if or (eq .Values.holders "proc") (include "gpuactors.binds" .) .Values.computeDomains.enabled }}true{{ end }}
{{- end }}

{{/* "true" if the API server is asked: the pod has its token. */}}
{{- define "gpuactors.asks" -}}
{{- if or .Values.dra.enabled .Values.events.enabled (include "gpuactors.readsLabels" .) }}true{{ end }}
{{- end }}

{{/* "true" if the labels of the Node are read: an entry of `nodes` matches by labels, and no setting has them. */}}
{{- define "gpuactors.readsLabels" -}}
{{- $byLabel := list }}
{{- range .Values.nodes }}{{ with .match.labels }}{{ $byLabel = append $byLabel . }}{{ end }}{{ end }}
{{- if and $byLabel (not .Values.settings.node_labels) }}true{{ end }}
{{- end }}

{{/* "true" if a running daemon reads a changed configuration file. YAML reads a bare `on` as a boolean. */}}
{{- define "gpuactors.reloads" -}}
{{- if has (toString .Values.settings.reload) (list "on" "true" "yes") }}true{{ end }}
{{- end }}

{{/* "true" if the settings are a file, and no variables: these would win over entries of `nodes`, and never change in a pod. */}}
{{- define "gpuactors.hasFile" -}}
{{- if or .Values.nodes (include "gpuactors.reloads" .) }}true{{ end }}
{{- end }}

{{/* The configuration file. The labels are a variable: a file for several nodes cannot have them. */}}
{{- define "gpuactors.file" -}}
{{- $nodes := empty .Values.nodes | ternary dict (dict "nodes" .Values.nodes) }}
{{- toYaml (merge $nodes (omit .Values.settings "node_labels")) }}
{{- end }}

{{/* Name of its ConfigMap, with a hash of it: a change replaces the pods as an update does, and a running pod keeps its file. Where
the file is read again, the name stays, and the ConfigMap changes under the pods. */}}
{{- define "gpuactors.configMap" -}}
{{ include "gpuactors.fullname" . }}-config{{ if not (include "gpuactors.reloads" .) }}-{{ include "gpuactors.file" . | sha256sum | trunc 10 }}{{ end }}
{{- end }}

{{/* Type of SELinux: reading other processes, and writing CDI files or NFD's, is more than a device plugin's type may. */}}
{{- define "gpuactors.seLinuxType" -}}
{{- if .Values.seLinuxType }}{{ .Values.seLinuxType }}
{{- else if or (include "gpuactors.processes" .) .Values.dra.enabled .Values.kata.enabled .Values.nodeFeatures.enabled }}spc_t
{{- else }}container_device_plugin_t
{{- end }}
{{- end }}

{{/* A mount that is read-only with all that is mounted below it. Kubernetes before 1.30 does not know the second field. */}}
{{- define "gpuactors.readOnly" -}}
readOnly: true
{{- if semverCompare ">=1.30-0" .Capabilities.KubeVersion.Version }}
recursiveReadOnly: IfPossible
{{- end }}
{{- end }}

{{/* Where the pods may run. Node Feature Discovery names a PCI device by vendor, or by class and vendor. */}}
{{- define "gpuactors.affinity" -}}
{{- with .Values.affinity }}
{{- toYaml . }}
{{- end }}
{{- if .Values.nodeFeatures.affinity }}
nodeAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    nodeSelectorTerms:
      {{- range list "pci-10de" "pci-0300_10de" "pci-0302_10de" }}
      - matchExpressions:
          - key: feature.node.kubernetes.io/{{ . }}.present
            operator: In
            values: ["true"]
      {{- end }}
{{- end }}
{{- end }}

{{/* A setting as a variable has it: the parts of a list separated by `;`. */}}
{{- define "gpuactors.setting" -}}
{{- if kindIs "slice" . }}{{ join ";" . }}{{ else if kindIs "string" . }}{{ . }}{{ else }}{{ toJson . }}{{ end }}
{{- end }}

{{/* What no schema can say. */}}
{{- define "gpuactors.check" -}}
{{- range $key, $value := dict
  "host_root" "" "node_name" ""
  "kubelet_dir" "kubeletDir" "device_plugin_dir" "devicePluginDir" "state_dir" "stateDir" "holders" "holders" "http_address" "port"
  "dra" "dra.enabled" "driver_name" "dra.driverName" "cdi_dir" "dra.cdiDir" "driver_root" "dra.driverRoot" "load_modules" "dra.loadModules"
  "compute_domains" "computeDomains.enabled" "domains_driver" "computeDomains.driverName"
  "domains_namespace" "computeDomains.namespace" "imex_ctl" "computeDomains.imexCtl"
  "preset" "kata.enabled"
  "events" "events.enabled" "nfd_file" "nodeFeatures.enabled" }}
{{- $remedy := (ne $value "") | ternary (printf "set %s, from which the pod's mounts and rights follow" $value) "it follows from the pod" }}
{{- if hasKey $.Values.settings $key }}
{{- fail (printf "settings.%s cannot be set: %s" $key $remedy) }}
{{- end }}
{{- range $index, $entry := $.Values.nodes }}
{{- if hasKey $entry.settings $key }}
{{- fail (printf "nodes[%d].settings.%s cannot be set: %s" $index $key $remedy) }}
{{- end }}
{{- end }}
{{- end }}
{{- range $index, $entry := .Values.nodes }}
{{- if hasKey $entry.settings "reload" }}
{{- fail (printf "nodes[%d].settings.reload cannot be set: set settings.reload, from which the ConfigMap follows" $index) }}
{{- end }}
{{- end }}
{{- range .Values.extraEnv }}
{{- if hasPrefix "GPUACTORS_" .name }}
{{- fail (printf "extraEnv has %s: set settings.%s, whose value is checked" .name (trimPrefix "GPUACTORS_" .name | lower)) }}
{{- end }}
{{- end }}
{{- if and (not .Values.serviceAccount.create) (not .Values.serviceAccount.name) }}
{{- fail "serviceAccount.create: false needs serviceAccount.name: the account that the pods have" }}
{{- end }}
{{- if eq .Values.serviceAccount.name "default" }}
{{- fail "serviceAccount.name: default is the account of every pod without one of its own, and the admission policies would limit them all: name another" }}
{{- end }}
{{- if and .Values.nodeFeatures.affinity .Values.affinity.nodeAffinity }}
{{- fail "nodeFeatures.affinity is a nodeAffinity, as is affinity.nodeAffinity: set one of them" }}
{{- end }}
{{- if and .Values.dra.loadModules (not (include "gpuactors.binds" .)) }}
{{- fail "dra.loadModules needs dra.enabled, and not dra.allPrebound: a driver is loaded only where one is bound" }}
{{- end }}
{{- if and (eq (get .Values.settings "allocate_as" | default "") "cdi") (not .Values.kata.enabled) }}
{{- fail "settings.allocate_as: cdi needs kata.enabled, from which the pod's mount of the CDI directory follows: set that" }}
{{- end }}
{{- if and .Values.computeDomains.enabled (not .Values.dra.enabled) }}
{{- fail "computeDomains.enabled needs dra.enabled: set it as well, as both share the API server's rights and kubelet's registration" }}
{{- end }}
{{- if and .Values.events.enabled (semverCompare "<1.32-0" .Capabilities.KubeVersion.Version) }}
{{- fail (printf "events.enabled needs Kubernetes 1.32 or newer, and this is %s: leave it out, or render with --kube-version" .Capabilities.KubeVersion.Version) }}
{{- end }}
{{- if and .Values.computeDomains.hostManaged (not .Values.computeDomains.enabled) }}
{{- fail "computeDomains.hostManaged needs computeDomains.enabled: set it as well" }}
{{- end }}
{{- if and .Values.monitoring.enabled (not (.Capabilities.APIVersions.Has "monitoring.coreos.com/v1")) }}
{{- fail "monitoring.enabled needs Prometheus' operator, and this cluster does not know monitoring.coreos.com/v1: install that first, or render with --api-versions monitoring.coreos.com/v1" }}
{{- end }}
{{- if and .Values.dra.enabled (semverCompare "<1.34-0" .Capabilities.KubeVersion.Version) }}
{{- fail (printf "dra.enabled needs Kubernetes 1.34 or newer, and this is %s: leave it out, or render with --kube-version" .Capabilities.KubeVersion.Version) }}
{{- end }}
{{- end }}
