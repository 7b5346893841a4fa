{{/* Name of the objects. */}}
{{- define "gpuactors.name" -}}
{{ .Values.nameOverride | default .Chart.Name }}
{{- end }}

{{/* Labels of every object; the first one alone selects the pods. */}}
{{- define "gpuactors.labels" -}}
app.kubernetes.io/name: {{ include "gpuactors.name" . }}
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

{{- define "gpuactors.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}
{{- end }}

{{/* The pod's account, as the API server names it in a request. */}}
{{- define "gpuactors.username" -}}
system:serviceaccount:{{ .Release.Namespace }}:{{ include "gpuactors.name" . }}
{{- end }}

{{/* The subject of every binding. */}}
{{- define "gpuactors.subjects" -}}
- kind: ServiceAccount
  name: {{ include "gpuactors.name" . }}
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
{{- if or .Values.dra.enabled .Values.events.enabled }}true{{ end }}
{{- end }}

{{/* Type of SELinux: reading other processes, and writing CDI files or NFD's, is more than a device plugin's type may. */}}
{{- define "gpuactors.seLinuxType" -}}
{{- if .Values.seLinuxType }}{{ .Values.seLinuxType }}
{{- else if or (include "gpuactors.processes" .) .Values.dra.enabled .Values.nodeFeatures.enabled }}spc_t
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

{{/* A setting as a variable has it: the parts of a list separated by `;`. */}}
{{- define "gpuactors.setting" -}}
{{- if kindIs "slice" . }}{{ join ";" . }}{{ else if kindIs "string" . }}{{ . }}{{ else }}{{ toJson . }}{{ end }}
{{- end }}

{{/* What no schema can say. */}}
{{- define "gpuactors.check" -}}
{{- if and .Values.dra.loadModules (not (include "gpuactors.binds" .)) }}
{{- fail "dra.loadModules needs dra.enabled, and not dra.allPrebound: a driver is loaded only where one is bound" }}
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
